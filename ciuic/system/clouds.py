"""Names of the clouds whose notices of a machine's end are understood (`ciuic.system.cloud_notices`).

Apart from what asks them, because every command that reads the configuration needs the names.
"""

from typing import Literal

Cloud = Literal["aws", "gcp", "azure"]
