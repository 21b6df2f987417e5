"""Kinds and fields of the records of a session's journal: u32 length, u8 kind, fixed fields, then names.

All integers are little-endian. The docstring beside each structure lists its fields, and what follows them.
"""

from __future__ import annotations

import struct

LENGTH = struct.Struct("<I")
KIND = struct.Struct("<B")
# A successor of another version reads these numbers: none changes its meaning. A greater one than the last
# ends the reading, as a record that was cut short does.
BEGIN, NODE, NAME, RENAMED, UNLINKED, DROPPED, REPLACED = 1, 2, 3, 4, 5, 6, 7
OPENED, CLOSED, DIR_OPENED, DIR_CLOSED, LISTING = 8, 9, 10, 11, 12
INTENT, LINGERS, LINGERS_NOT, CHANGING, EMPTIED, UNCHANGED = 13, 14, 15, 16, 17, 18

BEGIN_FIELDS = struct.Struct("<IIQI")
"""version, minor, flags, max_write_bytes"""
NODE_FIELDS = struct.Struct("<QQQQI")
"""id, dev, ino, parent (0: none), kind; name"""
NAME_FIELDS = struct.Struct("<QQB")
"""id, parent, several; name"""
RENAMED_FIELDS = struct.Struct("<QQQH")
"""id, parent, new parent, length of the old name; old name, new name"""
UNLINKED_FIELDS = struct.Struct("<QQB")
"""id, parent, gone; name"""
REPLACED_FIELDS = struct.Struct("<QQQ")
"""id, dev, ino"""
OPENED_FIELDS = struct.Struct("<QQQIII")
"""handle, node, unique of the request, flags of the open, open_flags of the answer, backing id (0: none)"""
EMPTIED_FIELDS = struct.Struct("<QIII")
"""id, mode, uid, gid"""
USER = struct.Struct("<I")
"""uid of the user who opened it, behind the fields of an open file or directory; absent in records of older
versions"""
PAIR = struct.Struct("<QQ")
TRIPLE = struct.Struct("<QQQ")
ONE = struct.Struct("<Q")
