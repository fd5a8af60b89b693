#!/bin/sh
# Exports a block device of blockd to other hosts over NVMe/TCP, by the kernel's own target:
#
#   nvmet.sh export [POOL/]VOLUME HOSTNQN...
#   nvmet.sh unexport [POOL/]VOLUME
#
# HOSTNQN is the content of /etc/nvme/hostnqn of a host that may connect. Both commands can be
# repeated. ADDRESS and SERVICE say where to listen, PORT is the number of the port in configfs.
set -eu

nvmet=/sys/kernel/config/nvmet
address=${ADDRESS:-0.0.0.0}
service=${SERVICE:-4420}
port=$nvmet/ports/${PORT:-1}

usage() {
    echo "usage: nvmet.sh export [POOL/]VOLUME HOSTNQN... | unexport [POOL/]VOLUME" >&2
    exit 2
}

[ $# -ge 2 ] || usage
verb=$1
case $2 in
    */*) volume=$2 ;;
    *) volume=default/$2 ;;
esac
shift 2
name=$(echo "$volume" | tr / :)
nqn=nqn.2026-01.io.blockd:$name
subsystem=$nvmet/subsystems/$nqn
namespace=$subsystem/namespaces/1
# Hosts know a disk by these: they stay the same whenever it is exported.
digest=$(echo "$volume" | md5sum | cut -c1-32)
uuid=$(echo "$digest" | sed 's/^\(.\{8\}\)\(.\{4\}\)\(.\{4\}\)\(.\{4\}\)/\1-\2-\3-\4-/')

link() {
    [ -e "$2" ] || ln -s "$1" "$2"
}

export_volume() {
    [ $# -ge 1 ] || usage
    device=/dev/blockd/$volume
    [ -b "$device" ] || { echo "nvmet.sh: $device is no block device: attach $volume" >&2; exit 1; }
    modprobe nvmet-tcp 2>/dev/null || true
    [ -d "$nvmet" ] || { echo "nvmet.sh: no $nvmet: load nvmet-tcp, mount configfs" >&2; exit 1; }
    mkdir -p "$subsystem"
    echo 0 >"$subsystem/attr_allow_any_host"
    for host; do
        mkdir -p "$nvmet/hosts/$host"
        link "$nvmet/hosts/$host" "$subsystem/allowed_hosts/$host"
    done
    mkdir -p "$namespace"
    if [ "$(cat "$namespace/enable")" = 0 ]; then
        echo "$digest" | cut -c1-20 >"$subsystem/attr_serial"
        echo "$uuid" >"$namespace/device_uuid"
        echo "$device" >"$namespace/device_path"
        echo 1 >"$namespace/enable"
    fi
    if [ ! -d "$port" ]; then
        mkdir "$port"
        case $address in
            *:*) echo ipv6 >"$port/addr_adrfam" ;;
            *) echo ipv4 >"$port/addr_adrfam" ;;
        esac
        echo tcp >"$port/addr_trtype"
        echo "$address" >"$port/addr_traddr"
        echo "$service" >"$port/addr_trsvcid"
    fi
    link "$subsystem" "$port/subsystems/$nqn"
    echo "$nqn"
}

unexport_volume() {
    [ -d "$subsystem" ] || return 0
    # Hosts lose the disk here: unmount it there first.
    rm -f "$port/subsystems/$nqn"
    if [ -d "$namespace" ]; then
        echo 0 >"$namespace/enable"
        rmdir "$namespace"
    fi
    for host in "$subsystem"/allowed_hosts/*; do
        [ ! -L "$host" ] || rm "$host"
    done
    rmdir "$subsystem"
    [ -n "$(ls "$port/subsystems" 2>/dev/null)" ] || [ ! -d "$port" ] || rmdir "$port"
}

case $verb in
    export) export_volume "$@" ;;
    unexport) unexport_volume ;;
    *) usage ;;
esac
