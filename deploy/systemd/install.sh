#!/bin/sh
# Installs Ballast as a service of this machine, or removes it.
#
#   install.sh BINARY --kubeconfig FILE [--server URL] [--end-udp-sockets] [--no-start]
#   install.sh --uninstall [--keep-running]
#
# BINARY      the static binary of `cargo xtask image`, or any other build of `ballast`
# --kubeconfig  absolute path of the file with the API server's address and the agent's credentials
# --server    comma-separated URLs of the API servers, if not the one in the kubeconfig; not the address of a Service
# --end-udp-sockets  also install a second service, which closes connected UDP sockets of pods when their endpoint is removed
# --no-start  only install the files
# --keep-running  keep programs and maps in the kernel: Services keep working, but changes are not applied
# DESTDIR     a folder to install into instead of /, for packages; then nothing is started
set -eu

say() { echo "install.sh: $*" >&2; }
fail() { say "$*"; exit 1; }

here=$(cd "$(dirname "$0")" && pwd)
dest=${DESTDIR:-}
program=$dest/usr/local/bin/ballast
units=$dest/etc/systemd/system
unit=$units/ballast.service
config=$dest/etc/ballast/config.yaml
environment=$dest/etc/ballast/environment

has_systemd() { [ -z "$dest" ] && [ -d /run/systemd/system ]; }

# Prints a variable of the agent. The file is not shell code: systemd takes spaces in a value without quotes, too.
variable() { sed -n "s/^[[:space:]]*$1=[\"']\{0,1\}\([^\"']*\).*/\1/p" "$environment" 2>/dev/null | sed -n '$s/[[:space:]]*$//p'; }

uninstall() {
    for name in ballast-end-udp-sockets ballast; do
        if has_systemd && systemctl cat "$name.service" >/dev/null 2>&1; then
            systemctl disable --now "$name.service"
        fi
    done
    if [ "$1" = clean ] && [ -z "$dest" ] && [ -x "$program" ]; then
        # `cleanup` needs the folders that the agent uses.
        bpffs=$(variable BALLAST_BPFFS) cgroup=$(variable BALLAST_CGROUP_ROOT)
        env ${bpffs:+"BALLAST_BPFFS=$bpffs"} ${cgroup:+"BALLAST_CGROUP_ROOT=$cgroup"} "$program" cleanup --yes
    fi
    rm -f "$unit" "$units/ballast-end-udp-sockets.service" "$program"
    if has_systemd; then systemctl daemon-reload; fi
    say "removed; /etc/ballast stays"
}

binary='' kubeconfig='' server='' start=yes action=install clean=clean helper=''
while [ $# -gt 0 ]; do
    case $1 in
        --kubeconfig) kubeconfig=${2:?--kubeconfig needs a file}; shift ;;
        --server) server=${2:?--server needs a URL}; shift ;;
        --end-udp-sockets) helper=ballast-end-udp-sockets.service ;;
        --no-start) start=no ;;
        --uninstall) action=uninstall ;;
        --keep-running) clean=keep ;;
        -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
        -*) fail "unknown option $1 (--help)" ;;
        *) [ -z "$binary" ] || fail "more than one binary is given: $1"; binary=$1 ;;
    esac
    shift
done

[ -n "$dest" ] || [ "$(id -u)" = 0 ] || fail "run this as root"
if [ "$action" = uninstall ]; then
    uninstall "$clean"
    exit
fi

[ -n "$binary" ] || fail "name the binary of ballast (--help)"
[ -x "$binary" ] || fail "$binary is not an executable file"
[ -n "$kubeconfig" ] || fail "--kubeconfig is needed: the file with the API server's address and the agent's credentials (--help)"
case $kubeconfig in /*) ;; *) fail "--kubeconfig needs an absolute path: $kubeconfig" ;; esac
[ -n "$dest" ] || [ -r "$kubeconfig" ] || fail "cannot read $kubeconfig"
"$binary" --version >/dev/null || fail "$binary does not run here"

# The installed program may be given, to install a second service; install(1) refuses to copy a file to itself.
# shellcheck disable=SC3013 # dash, bash and busybox have -ef
[ "$binary" -ef "$program" ] || install -D -m 0755 "$binary" "$program"
install -D -m 0644 "$here/ballast.service" "$unit"
if [ -n "$helper" ]; then install -D -m 0644 "$here/$helper" "$units/$helper"; fi
if [ -e "$config" ]; then
    say "/etc/ballast/config.yaml is there already, and stays as it is"
else
    mkdir -p "$(dirname "$config")"
    cat >"$config" <<EOF
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection:
  kubeconfig: $kubeconfig
EOF
fi
if [ -n "$server" ]; then
    { if [ -e "$environment" ]; then grep -v '^BALLAST_MASTER=' "$environment" || true; fi; echo "BALLAST_MASTER=$server"; } >"$environment.new"
    mv "$environment.new" "$environment"
fi
say "installed $("$binary" --version)"
if [ "$start" = yes ] && has_systemd; then
    systemctl daemon-reload
    # Without quotes, because $helper is empty if the second service is not installed.
    # shellcheck disable=SC2086
    systemctl enable ballast.service $helper
    # shellcheck disable=SC2086
    systemctl restart ballast.service $helper
    say "started: journalctl -u ballast, ballast status"
fi
