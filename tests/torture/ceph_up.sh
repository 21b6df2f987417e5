#!/bin/bash
# A one-node Ceph with radosgw, no systemd. usage: ceph_up.sh DIR ; ~1.5 GB of memory
set -e
D=$1; mkdir -p $D/{mon,mgr,osd,rgw,run}; cd $D
FSID=$(uuidgen); export CEPH_CONF=$D/ceph.conf
cat > ceph.conf <<C
[global]
fsid = $FSID
mon host = [v2:127.0.0.1:13300,v1:127.0.0.1:16789]
mon initial members = a
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = $D/keyring
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data = $D/mon
mgr data = $D/mgr
osd data = $D/osd
osd objectstore = bluestore
bluestore block size = 10737418240
bluestore_fsck_on_mount = false
osd memory target = 939524096
bluestore cache size = 134217728
public addr = 127.0.0.1
cluster addr = 127.0.0.1
run dir = $D/run
admin socket = $D/run/\$name.asok
pid file = $D/run/\$name.pid
log file = $D/\$name.log
mon pg warn min per osd = 0
mon max pg per osd = 1000
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
rgw frontends = beast endpoint=127.0.0.1:17480
rgw data = $D/rgw
rgw enable usage log = false
rgw relaxed s3 bucket names = true
C
ceph-authtool --create-keyring $D/keyring --gen-key -n mon. --cap mon 'allow *' >/dev/null
ceph-authtool $D/keyring --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *' --cap mds 'allow *'
monmaptool --create --fsid $FSID --addv a '[v2:127.0.0.1:13300,v1:127.0.0.1:16789]' $D/monmap >/dev/null
ceph-mon --mkfs -i a --monmap $D/monmap --keyring $D/keyring --conf $CEPH_CONF
ceph-mon -i a --conf $CEPH_CONF
ceph mon enable-msgr2 || true
ceph auth get-or-create mgr.x mon 'allow profile mgr' osd 'allow *' mds 'allow *' >> $D/keyring
ceph-mgr -i x --conf $CEPH_CONF
U=$(uuidgen); K=$(ceph-authtool --gen-print-key); ID=$(echo "{\"cephx_secret\": \"$K\"}" | ceph osd new $U -i -)
printf '[osd.%s]\n\tkey = %s\n' $ID $K >> $D/keyring
ceph-osd -i $ID --mkfs --osd-uuid $U --conf $CEPH_CONF
ceph-osd -i $ID --conf $CEPH_CONF
for i in $(seq 60); do ceph osd stat | grep -q '1 up' && break; sleep .5; done
ceph auth get-or-create client.rgw.a mon 'allow rw' osd 'allow rwx' >> $D/keyring
timeout 60 radosgw -n client.rgw.a --conf $CEPH_CONF
for i in $(seq 60); do curl -s -o /dev/null http://127.0.0.1:17480/ && break; sleep .5; done
radosgw-admin user create --uid=t --display-name=t --access-key="$ACCESS_KEY" --secret-key="$SECRET_KEY" >/dev/null
cat $D/run/*.pid | tr '\n' ' '; echo
