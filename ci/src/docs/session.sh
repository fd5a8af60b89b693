# The beginning of each session. The commands of a page follow. Set by the caller: BLOCKD and
# BLOCKD_CSI, the programs; PLACE, a folder on a disk; RUN, one on a tmpfs; ROOT, the repository.
set -eu -o pipefail
export BLOCKD_SOCKET="$RUN/control.sock"
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
mkdir -p "$PLACE/srv" "$PLACE/clone"
cat >"$PLACE/blockd.toml" <<END
runtime_dir = "$RUN"
state_dir = "$PLACE/state"
[workers]
count = 1
# No device of this machine is made.
[ublk]
enabled = "off"
[[pool]]
name = "default"
path = "$PLACE/srv/fast.pool"
size = "8G"
volatile = true
END
ln -s "$ROOT/docs" "$PLACE/clone/docs"
cd "$PLACE/clone"

daemon=
# Of systemd, the commands of the pages, for the daemon of this session.
systemctl() {
    local -
    set +x
    case "$1" in
    start | enable)
        [ -z "$daemon" ] || return 0
        "$BLOCKD" serve --config "$PLACE/blockd.toml" >>"$PLACE/daemon.log" 2>&1 </dev/null &
        daemon=$!
        until "$BLOCKD" --json version | tr -d ' \n' | grep -q '"daemon":{'; do
            kill -0 "$daemon"
            sleep 0.05
        done
        ;;
    stop)
        [ -n "$daemon" ] || return 0
        kill "$daemon"
        wait "$daemon"
        daemon=
        ;;
    restart)
        systemctl stop blockd
        systemctl start blockd
        ;;
    reload)
        kill -HUP "$daemon"
        ;;
    *)
        return 1
        ;;
    esac
}
blockd() {
    if [ "$1" = serve ]; then
        systemctl start blockd
    else
        "$BLOCKD" "$@"
    fi
}
target/release/blockd() {
    blockd "$@"
}
blockd-0.1() {
    blockd "$@"
}
blockd-csi() {
    "$BLOCKD_CSI" "$@"
}
trap '[ -z "$daemon" ] || kill -9 "$daemon"' EXIT
set -x
