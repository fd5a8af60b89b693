#!/bin/sh
# The first process of a guest: mounts, loads, runs /script with the second serial line as its
# terminal, says how it ended, and switches the machine off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/busybox HOME=/root LC_ALL=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
ip link set lo up
exec </dev/ttyS1 >/dev/ttyS1 2>&1
stty -echo -onlcr -icrnl
while read -r module parameters; do
    # Several parameters are several words.
    # shellcheck disable=SC2086
    insmod "$module" $parameters || echo "cannot load $module"
done </modules/order
# A task that is stuck is reported on the console, and so fails the run.
for setting in hung_task_timeout_secs:120 hung_task_check_interval_secs:10 hung_task_warnings:-1; do
    file=/proc/sys/kernel/${setting%%:*}
    if [ -e "$file" ]; then echo "${setting##*:}" >"$file"; fi
done
# Where each thread of the programs stands, and which of the kernel's wait for a device.
threads() {
    for thread in /proc/[0-9]*/task/*; do
        read -r stat <"$thread/stat" || continue
        stat=${stat##*) }
        if [ -e "$thread/exe" ] || [ "${stat%% *}" = D ]; then
            echo "== ${thread#/proc/} ${stat%% *}"
            cat "$thread/comm" "$thread/syscall" "$thread/stack"
        fi
    done 2>/dev/null
}
# A script that is near the end of its time is stuck somewhere. LIMIT is of the kernel's command
# line, in seconds from before the boot.
if [ "${LIMIT:-0}" -gt 110 ]; then
    (
        sleep $((LIMIT - 50))
        threads >/dev/ttyS0
    ) &
fi
cd /root
echo @@started
if [ -e /script-is-first ]; then exec /bin/sh /script; fi
/bin/sh /script
status=$?
# The mark stands on a line of its own whatever the script printed last.
printf '\n@@ended %s\n' "$status"
sync
poweroff -f
