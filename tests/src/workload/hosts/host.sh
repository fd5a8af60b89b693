# One of the hosts: the shared disk and the lock manager. Sourced in its machine.

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

# blocks DEVICE once|fill|verify|on: blocks that say that this host wrote them.
blocks() { /usr/bin/workload inside --seed 0 blocks "$1" "$2" "${3:-$HOST_ID}"; }

# locks: the watchdog's daemon, sanlock and lvmlockd.
locks() {
    mkdir -p /run/wdmd /run/sanlock /run/lvm /run/lock/lvm /etc/lvm /etc/sanlock /var/log
    put "local { host_id = $HOST_ID }" /etc/lvm/lvmlocal.conf
    cat >/etc/lvm/lvm.conf <<END
global { use_lvmlockd = 1 event_activation = 0 use_lvmpolld = 0 $KILL }
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
    # What it holds is found again when it is started anew.
    lvmlockd --adopt 1 --sanlock-timeout "$IO_TIMEOUT"
}

# take_over VOLUME HOST: what the lease of a fenced host stands for is over, so it is made anew. A
# lease of another host is left alone.
take_over() {
    lease=lvm_vg:$(volume lv_uuid "$1"):/dev/mapper/vg-lvmlock:$(volume lv_lockargs "$1" | cut -d: -f2)
    sanlock direct read_leader -r "$lease" | grep -qx "owner_id $2" || return
    sanlock direct init -r "$lease" && lvchange -aey "vg/$1"
}

# volume FIELD VOLUME
volume() { lvs --noheadings -o "$1" "vg/$2" 2>/dev/null | tr -d ' '; }
