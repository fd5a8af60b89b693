#!/bin/sh
# Exports a block device of blockd to other hosts over NVMe/TCP, by the kernel's own target:
#
#   nvmet.sh export [POOL/]VOLUME HOSTNQN...
#   nvmet.sh unexport [POOL/]VOLUME
#
# HOSTNQN is the content of /etc/nvme/hostnqn of a host that may connect; hosts of an earlier export
# that are not named may not connect again. Both commands can be repeated. ADDRESS and SERVICE say
# where to listen, PORT is the number of the port in configfs.
set -eu

nvmet=/sys/kernel/config/nvmet
address=${ADDRESS:-0.0.0.0}
service=${SERVICE:-4420}
port=$nvmet/ports/${PORT:-1}

usage() {
    echo "usage: nvmet.sh export [POOL/]VOLUME HOSTNQN... | unexport [POOL/]VOLUME" >&2
    exit 2
}

fail() {
    printf 'nvmet.sh: %s\n' "$1" >&2
    exit 1
}

digest() {
    printf '%s\n' "$1" | md5sum | cut -c1-32
}

[ $# -ge 2 ] || usage
verb=$1
case $2 in
    */*) volume=$2 ;;
    *) volume=default/$2 ;;
esac
shift 2
[ -s /etc/machine-id ] || fail "no /etc/machine-id: systemd-machine-id-setup makes it"
# Other hosts know a disk by its names: they stay the same whenever it is exported, and no volume of
# another host has them. The digest keeps the machine's id from the network.
host=$(digest "$(cat /etc/machine-id)" | cut -c1-12)
nqn=nqn.2026-01.io.blockd:$host:$(printf '%s' "$volume" | tr / :)
subsystem=$nvmet/subsystems/$nqn
namespace=$subsystem/namespaces/1
number=$(digest "$host/$volume")
uuid=$(printf '%s' "$number" | sed 's/^\(.\{8\}\)\(.\{4\}\)\(.\{4\}\)\(.\{4\}\)/\1-\2-\3-\4-/')

link() {
    [ -e "$2" ] || ln -s "$1" "$2"
}

is_in() {
    word=$1
    shift
    for one; do
        [ "$one" != "$word" ] || return 0
    done
    return 1
}

# A port that has other subsystems stays as it is.
make_port() {
    case $address in
        *:*) family=ipv6 ;;
        *) family=ipv4 ;;
    esac
    mkdir -p "$port"
    if [ -z "$(ls "$port/subsystems")" ]; then
        printf '%s\n' "$family" >"$port/addr_adrfam"
        echo tcp >"$port/addr_trtype"
        printf '%s\n' "$address" >"$port/addr_traddr"
        printf '%s\n' "$service" >"$port/addr_trsvcid"
    fi
    at="$(cat "$port/addr_trtype") $(cat "$port/addr_traddr") $(cat "$port/addr_trsvcid")"
    [ "$at" = "tcp $address $service" ] ||
        fail "$port is $at, not tcp $address $service: set PORT to another number"
}

export_volume() {
    [ $# -ge 1 ] || usage
    device=/dev/blockd/$volume
    [ -b "$device" ] || fail "$device is no block device: attach $volume"
    modprobe nvmet-tcp 2>/dev/null || true
    [ -d "$nvmet" ] || fail "no $nvmet: load nvmet-tcp, mount configfs"
    make_port
    mkdir -p "$subsystem"
    echo 0 >"$subsystem/attr_allow_any_host"
    for allowed in "$subsystem"/allowed_hosts/*; do
        [ ! -L "$allowed" ] || is_in "${allowed##*/}" "$@" || rm "$allowed"
    done
    for name; do
        mkdir -p "$nvmet/hosts/$name"
        link "$nvmet/hosts/$name" "$subsystem/allowed_hosts/$name"
    done
    mkdir -p "$namespace"
    if [ "$(cat "$namespace/enable")" = 0 ]; then
        printf '%s\n' "$number" | cut -c1-20 >"$subsystem/attr_serial"
        printf '%s\n' "$uuid" >"$namespace/device_uuid"
        printf '%s\n' "$device" >"$namespace/device_path"
        echo 1 >"$namespace/enable"
    fi
    link "$subsystem" "$port/subsystems/$nqn"
    printf '%s\n' "$nqn"
}

unexport_volume() {
    [ -d "$subsystem" ] || return 0
    # Hosts lose the disk here: unmount it there first. It may be at any port.
    for exported in "$nvmet"/ports/*/subsystems/"$nqn"; do
        [ -L "$exported" ] || continue
        rm "$exported"
        rmdir "${exported%/subsystems/*}" 2>/dev/null || true
    done
    if [ -d "$namespace" ]; then
        echo 0 >"$namespace/enable"
        rmdir "$namespace"
    fi
    for allowed in "$subsystem"/allowed_hosts/*; do
        [ ! -L "$allowed" ] || rm "$allowed"
    done
    rmdir "$subsystem"
}

case $verb in
    export) export_volume "$@" ;;
    unexport) unexport_volume ;;
    *) usage ;;
esac
