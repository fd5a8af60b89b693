# The array: exports /dev/vda to the hosts, with persistent reservations. Sourced in its machine.
config=/sys/kernel/config

array() {
    mount -t configfs none "$config" || return
    if [ "$TRANSPORT" = nvme ]; then array_nvme; else array_iscsi; fi
}

array_nvme() {
    nvmet=$config/nvmet
    subsystem=$nvmet/subsystems/shared
    mkdir "$subsystem" && put 1 "$subsystem/attr_allow_any_host" || return
    # An array has the same names after a loss of power. Otherwise hosts take its disk for another
    # one, and remove the one that they had.
    put 5aa5 "$subsystem/attr_serial" || return
    namespace=$subsystem/namespaces/1
    mkdir "$namespace" && put /dev/vda "$namespace/device_path" || return
    put 5aa55aa5-0000-4000-8000-000000000001 "$namespace/device_uuid" || return
    put 5aa55aa5-0000-4000-8000-000000000001 "$namespace/device_nguid" || return
    put 1 "$namespace/resv_enable" && put 1 "$namespace/enable" || return
    port=$nvmet/ports/1
    mkdir "$port" && put ipv4 "$port/addr_adrfam" && put tcp "$port/addr_trtype" || return
    put "$ARRAY" "$port/addr_traddr" && put 4420 "$port/addr_trsvcid" || return
    ln -s "$subsystem" "$port/subsystems/shared"
}

array_iscsi() {
    keep || return
    disk=$config/target/core/iblock_0/shared
    mkdir -p "$disk" && put udev_path=/dev/vda "$disk/control" && put 1 "$disk/enable" || return
    put shared "$disk/wwn/vpd_unit_serial" && restore || return
    group=$config/target/iscsi/iqn.2000-01.lab:shared/tpgt_1
    mkdir -p "$group/np/$ARRAY:3260" "$group/lun/lun_0" || return
    ln -s "$disk" "$group/lun/lun_0/shared" || return
    # Initiators are known by name: the reservations of others would go with their session.
    for host in $HOSTS; do
        access=$group/acls/iqn.2000-01.lab:$host
        mkdir "$access" "$access/lun_0" && ln -s "$group/lun/lun_0" "$access/lun_0/shared" || return
    done
    put 0 "$group/attrib/authentication" && put 1 "$group/enable"
}

# keep: reservations that outlive a loss of power are on the array's own disk. LIO writes them without
# a sync of its own.
keep() {
    mkdir -p /keep /var/target /etc/target
    if ! mount -t ext4 -o sync,dirsync /dev/vdb /keep 2>/dev/null; then
        mkfs.ext4 -q /dev/vdb && mount -t ext4 -o sync,dirsync /dev/vdb /keep || return
    fi
    mkdir -p /keep/pr && ln -s /keep/pr /var/target/pr && ln -s /keep/pr /etc/target/pr
}

# restore: gives the kernel the reservations that it has kept, as targetcli does.
restore() {
    kept=/keep/pr/aptpl_shared
    [ -e "$kept" ] || return 0
    while read -r line; do
        case $line in
        PR_REG_START*) record= ;;
        PR_REG_END*) put "${record#,}" "$disk/pr/res_aptpl_metadata" || return ;;
        *) record=$record,$line ;;
        esac
    done <"$kept"
}
