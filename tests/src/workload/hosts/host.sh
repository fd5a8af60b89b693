# One of the hosts: the shared disk and the lock manager. Sourced in its machine.

# blockd: with patience. An emulated host on a busy machine takes longer than 30 s for some calls.
blockd() { command blockd --timeout 3m "$@"; }

# storage: connects to the array, and prints the disk's name.
storage() {
    if [ "$TRANSPORT" = nvme ]; then storage_nvme; else storage_iscsi; fi || return
    for _ in $(seq 100); do
        if [ -b "$DISK" ]; then echo "$DISK"; return; fi
        sleep 0.1
    done
    echo "there is no $DISK"
    return 1
}

storage_nvme() {
    id=00000000-0000-4000-8000-00000000000$HOST_ID
    put "transport=tcp,traddr=$ARRAY,trsvcid=4420,nqn=shared,hostnqn=lab:$NAME,hostid=$id,$NVME_TIMES" \
        /dev/nvme-fabrics
}

storage_iscsi() {
    mkdir -p /etc/iscsi /run/lock/iscsi /var/lib/iscsi
    put "InitiatorName=iqn.2000-01.lab:$NAME" /etc/iscsi/initiatorname.iscsi
    cat >/etc/iscsi/iscsid.conf <<END
node.startup = manual
node.session.timeo.replacement_timeout = 600
node.conn[0].timeo.noop_out_interval = 2
node.conn[0].timeo.noop_out_timeout = 5
node.session.iscsi.FastAbort = No
END
    iscsid || return
    iscsiadm -m discovery -t sendtargets -p "$ARRAY" || return
    iscsiadm -m node --login
}

# reservation register KEY, reserve KEY, fence KEY VICTIM: of the shared disk.
reservation() { /usr/bin/workload inside --seed 0 reservation "$DISK" "$@"; }

# blocks DEVICE once|fill|write|verify|since|on|flushing [HOST [LAST]]: blocks that say who wrote
# them; this host without a word.
blocks() {
    device=$1 what=$2 owner=${3:-$HOST_ID}
    if [ $# -gt 3 ]; then shift 3; else shift $#; fi
    /usr/bin/workload inside --seed 0 blocks "$device" "$what" "$owner" "$@"
}

# locks: the watchdog's daemon, sanlock and lvmlockd.
locks() {
    mkdir -p /run/wdmd /run/sanlock /run/lvm /run/lock/lvm /etc/lvm /etc/sanlock /var/log
    put "local { host_id = $HOST_ID }" /etc/lvm/lvmlocal.conf
    cat >/etc/lvm/lvm.conf <<END
global {
    use_lvmlockd = 1 event_activation = 0 use_lvmpolld = 0
    lvmlockctl_kill_command = "/usr/bin/blockd node lost"
}
activation { udev_sync = 0 udev_rules = 0 monitoring = 0 }
devices {
    use_devicesfile = 0 obtain_device_list_from_udev = 0 external_device_info_source = "none"
    global_filter = [ "a|^$DISK\$|", "r|.*|" ]
}
backup { backup = 0 archive = 0 }
END
    # LVM makes the node of the locks' volume only when its command ends, after the lock manager has
    # opened it: with udev, the node comes at once.
    cat >/nodes <<END
#!/bin/sh
case \$DEVPATH in */block/dm-*) dmsetup mknodes ;; esac
END
    chmod +x /nodes
    uevent /nodes >/dev/null 2>&1 &
    wdmd -G root || return
    # With a name that stays, a host that boots again does not wait for its own lease to expire.
    sanlock daemon -U root -G root -e "$NAME" || return
    # It answers some time after that.
    for _ in $(seq 100); do
        if sanlock client status >/dev/null 2>&1; then break; fi
        sleep 0.1
    done
    lock_manager
}

# lock_manager: lvmlockd. The older one finds the leases again that it had before it died; the newer
# one hangs with `--adopt 1`, and the daemon gives them to it.
lock_manager() { lvmlockd $ADOPT --sanlock-timeout "$IO_TIMEOUT"; }

# overwrite DEVICE SECONDS: writes 8 MiB and flushes, over and over, and prints how often.
overwrite() {
    count=0 end=$(($(date +%s) + $2))
    while [ "$(date +%s)" -lt "$end" ]; do
        dd if=/dev/zero of="$1" bs=1M count=8 conv=fsync 2>/dev/null || return
        count=$((count + 1))
    done
    echo "$count"
}

# serve: the daemon, until it answers. Its state is on the host's own disk; its own pool is one in
# memory, and is not used.
serve() {
    mkdir -p /etc/blockd /run/blockd /var/lib/blockd
    if ! mount -t ext4 /dev/vda /var/lib/blockd 2>/dev/null; then
        mkfs.ext4 -q /dev/vda && mount -t ext4 /dev/vda /var/lib/blockd || return
    fi
    cat >/etc/blockd/blockd.toml <<END
runtime_dir = "/run/blockd"
state_dir = "/var/lib/blockd"
[node]
id = "0000000$HOST_ID-0000-4000-8000-000000000000"
[hosts]
listen = "$ADDRESS:7020"
certificate = "/etc/blockd/host.pem"
key = "/etc/blockd/host.key"
ca = "/etc/blockd/ca.pem"
[[pool]]
name = "default"
path = "/tmp/pool"
size = "64M"
volatile = true
END
    command blockd serve --config /etc/blockd/blockd.toml >>/var/log/blockd 2>&1 &
    daemon=$!
    while kill -0 "$daemon" 2>/dev/null; do
        if blockd vg list >/dev/null 2>&1; then return; fi
        sleep 0.2
    done
    tail -20 /var/log/blockd
    return 1
}

# hook SCRIPT: the one that runs before a host is declared dead.
hook() {
    mkdir -p /etc/blockd/hooks/pre-declare-dead.d
    printf '#!/bin/sh\n%s\n' "$1" >/etc/blockd/hooks/pre-declare-dead.d/50-hook
    chmod 755 /etc/blockd/hooks /etc/blockd/hooks/pre-declare-dead.d/50-hook
}

# returned NODE: a host that has booted is dead no more, some seconds after its locks were started.
returned() {
    for _ in $(seq 60); do
        if ! blockd node list | grep -q "$1"; then return; fi
        sleep 1
    done
    blockd node list
    return 1
}

# unwatched, unwaited: the daemon has opened the cell `one`, and has watched no other host before,
# and not waited for one's last writes.
unwatched() {
    grep -q "pool one is open" /var/log/blockd && ! grep "watching for other hosts" /var/log/blockd
}
unwaited() {
    unwatched && ! grep -q "waiting for the last writes of other hosts" /var/log/blockd && return
    tail -40 /var/log/blockd
    return 1
}

# join: the volume group that the other host has made.
join() { serve && blockd vg add vg && vgchange --lockstart vg; }

# lease: the line of the lease of the cell `one` in the list of leases that this host has, if it is
# there. Fails where that can't be looked at.
lease() {
    id=$(lvs --noheadings -o uuid vg/cell-one) && id=$(echo "$id" | tr -d ' ') || return
    leases=$(sanlock client status) && [ -n "$id" ] || return
    echo "$leases" | sed -n "/^r .*$id/p"
}

# holds, lacks: whether this host has that lease, and whether it has it not.
holds() { found=$(lease) && [ -n "$found" ]; }
lacks() { found=$(lease) && [ -z "$found" ]; }

# lose: the daemon ends in order, and the lease of the cell `one` goes. LVM ends a lease and the use
# of the device together, so the device is made again as it was.
lose() {
    kill "$(pidof blockd)"
    while pidof blockd >/dev/null; do sleep 0.1; done
    table=$(dmsetup table vg-cell--one) || return
    id=$(dmsetup info -c --noheadings -o uuid vg-cell--one) || return
    lvchange -an vg/cell-one || return
    dmsetup create vg-cell--one --uuid "$id" --table "$table" || return
    # LVM removes the folder with the last name in it.
    mkdir -p /dev/vg && ln -sfn ../mapper/vg-cell--one /dev/vg/cell-one
}

# serve_again: the daemon, after one that has ended.
serve_again() { umount /var/lib/blockd; serve; }

# The volume of the cell `one`.
VOLUME=/dev/blockd/one/vol
attach() { blockd attach --ublk one/vol >/dev/null && [ -b "$VOLUME" ]; }
detach() { blockd detach one/vol >/dev/null; }
