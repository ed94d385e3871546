#!/usr/bin/env bash
# kernel.sh LINE ARCH APT_ROOT CACHE BALLAST NETNS INITRAMFS
# Downloads the newest kernel of a line, prints its image and its release, and writes an initramfs with which it runs the tests.
# With DEVICES=devices.sh, it runs that script instead, with programs of the kernel's distribution.
#
# apt runs with lists of its own, and with the sources of a machine of the kernel's distribution, in which another suite
# replaces the machine's. apt checks the signature of the index, and each package against the index.
set -euo pipefail
# Users' PATH often lacks the folders of administrators' tools: `ip`, `tc`, `depmod`.
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

die() { echo "error: $*" >&2; exit 1; }

# Modules that the tests need and distributions do not build in; other kernels have some of them built in.
modules='veth tun sch_ingress cls_bpf bridge inet_diag tcp_diag udp_diag crc32c_generic sctp'
readonly device_modules='bonding team team_mode_roundrobin 8021q vrf macvlan ipvlan macsec wireguard vxlan geneve ip_gre ip6_gre
    ipip sit ip6_tunnel ifb act_mirred act_gact cls_u32 cls_matchall sch_tbf nft_ct nft_masq nft_chain_nat aes_generic ctr gcm
    ghash-generic seqiv virtio_pci virtio_net vmxnet3 igb e1000e'
readonly device_packages='bash busybox-static ethtool iproute2 libteam-utils socat util-linux wireguard-tools'
# Patterns of the files to unpack; the 300 MB of other drivers are not needed.
readonly parts=('*/boot/vmlinuz-*' '*/vmlinuz' '*/modules.*' '*/kernel/net/*' '*/kernel/lib/*' '*/kernel/crypto/*'
    '*/kernel/arch/*/crypto/*' '*/kernel/drivers/virtio/*' '*/kernel/drivers/net/vmxnet3/*'
    '*/kernel/drivers/net/'{bonding,team,ipvlan,vxlan,wireguard,ethernet/intel/e1000e,ethernet/intel/igb}'/*'
    '*/kernel/drivers/net/'{geneve,ifb,macsec,macvlan,net_failover,netkit,tun,veth,virtio_net,vrf}'.ko*'
    '*/kernel/drivers/'{ptp,pps,dca,i2c}'/*')

# Sets the distribution of a line, the suites with its packages (a release, then its updates), the prefix of its versions, and that
# of its flavour: a line that ends in `-rt` is that of the kernels with PREEMPT_RT.
line() {
    local plain=${1%-rt}
    version=${plain//./\\.} realtime=
    [ "$plain" = "$1" ] || realtime=rt-
    case $plain in
        5.10) distribution=debian suites='bullseye bullseye-security' ;;
        5.13) distribution=ubuntu suites='focal focal-updates focal-security' ;;
        5.15 | 5.19) distribution=ubuntu suites='jammy jammy-updates jammy-security' ;;
        6.1) distribution=debian suites='bookworm bookworm-security' ;;
        6.12) distribution=debian suites='trixie trixie-security' ;;
        sid) distribution=debian suites=sid version='[0-9]+\.[0-9]+' ;;
        *) die "no kernel $1; there are 5.10, 5.13, 5.15, 5.19, 6.1, 6.12, sid, each of Debian's also with -rt, and running" ;;
    esac
    [ -z "$realtime" ] || [ "$distribution" = debian ] || die "no kernel $1: only Debian packages kernels with PREEMPT_RT"
}

# Chooses the package of the line's newest kernel of the plain flavour for the architecture `$1`; standard input has one package
# per line. A dash in a version may only be followed by a build number: 6.1.0-56, not 6.1.0-56-rt.
newest() {
    local flavour=$realtime$1
    [ "$distribution" = debian ] || flavour=generic
    grep -E "^linux-image-$version\.[0-9][^-]*(-[0-9]+)*-$flavour\$" | sort -V | tail -n 1 || true
}

# Prints the packages that contain a kernel and its modules: Ubuntu and newer Debian releases split a kernel up.
packages() {
    local release=${1#linux-image-}
    case $distribution-$suites in
        ubuntu-*) echo "$1 linux-modules-$release" ;;
        *-sid) echo "linux-binary-$release linux-base-$release linux-modules-$release" ;;
        *) echo "$1" ;;
    esac
}

# Returns a field of the release of the machine with the root folder $1.
field() { sed -n "s/^$2=\"\?\([^\"]*\)\"\?\$/\1/p" "$1/etc/os-release"; }

# Prints apt's sources of the machine with the root folder $1 for the architecture $2 and other suites: the first is the name of
# a release, others add a suffix (`trixie-security`). A suffix of which the machine has no source is left out.
sources() {
    local root=${1%/} arch=$2 release=$3 suite listed keys uri
    shift 2
    [ "$(field "$root" ID)" = "$distribution" ] ||
        die "$1 is packaged by $distribution: --apt-root names the root folder of a machine with apt sources of $distribution"
    keys=$root/usr/share/keyrings/$distribution-archive-keyring.gpg
    [ -e "$keys" ] || die "$keys is missing: it has the keys of the archive"
    # Also sources of which there are no lists yet.
    # shellcheck disable=SC2016
    listed=$(apt-get -o "Dir=$root/" indextargets --format '$(RELEASE) $(REPO_URI)' --no-release-info \
        'Created-By: Packages' 'Component: main')
    for suite; do
        uri=$(awk -v own="$(field "$root" VERSION_CODENAME)${suite#"$release"}" '$1 == own { print $2; exit }' <<<"$listed")
        # A list of mirrors is a file of the machine.
        if [ -n "$uri" ]; then
            echo "deb [arch=$arch signed-by=$keys] ${uri/file:\//file:$root/} $suite main"
        elif [ "$suite" = "$release" ]; then
            die "apt has no source of $(field "$root" VERSION_CODENAME), from which $suite could be had, too"
        fi
    done
}

# Runs a program of apt with the lists in the folder `archive`. It is to assume that no package is installed; its sandbox user
# cannot write to our folder.
apt() {
    "$1" -o "Dir::Etc::sourcelist=$archive/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$archive/lists" \
        -o Dir::State::status=/dev/null -o "Dir::Cache=$archive/cache" -o "APT::Architecture=$debian" \
        -o "APT::Architectures=$debian" -o APT::Sandbox::User=root "${@:2}"
}

# Sets `archive`, and fetches its lists if there are none or the sources have changed: MACHINE SUITE...
open() {
    local wanted
    command -v apt-get >/dev/null || die 'no apt-get here: packages of kernels are out of reach'
    wanted=$(sources "$1" "$debian" "${@:2}")
    archive=$cache/archives/$(IFS=-; echo "${*:2}")-$debian
    mkdir -p "$archive/lists/partial" "$archive/cache/archives/partial"
    if [ "$wanted" != "$(cat "$archive/fetched" 2>/dev/null)" ]; then
        echo "$wanted" >"$archive/sources.list"
        # By default, apt only warns of an index that it cannot download.
        apt apt-get -qq -o APT::Update::Error-Mode=any update >&2
        # Written last: the lists are complete.
        echo "$wanted" >"$archive/fetched"
    fi
}

# Prints the module files of a modules.dep (standard input) in an order in which they can be loaded, each after its
# dependencies, of which the deepest is listed last; without modules that the kernel lacks.
load_order() {
    awk -v wanted="$1" '
        function put(file) { if (!seen[file]++) print file }
        { name = $1; gsub(/.*\/|[.].*/, "", name); line[name] = $0; sub(/:/, "", line[name]) }
        END { for (i = 1; i <= split(wanted, all, " "); i++)
            for (j = n = split(line[all[i]], files, " "); j >= 1; j--) if (j > 1) put(files[j]); else if (n) put(files[1]) }'
}

# Unpacks the files of the package $1 that match one of the patterns `parts` into the folder `kernel`.
unpack() {
    local name part
    # tar itself fails for a pattern that matches nothing, as it does for a full disk.
    dpkg-deb --fsys-tarfile "$1" | tar -t | while IFS= read -r name; do
        # shellcheck disable=SC2053
        for part in "${parts[@]}"; do if [[ $name == $part ]]; then echo "$name"; fi; done
    done >"$kernel/chosen"
    dpkg-deb --fsys-tarfile "$1" | tar -x -C "$kernel" --no-recursion --verbatim-files-from -T "$kernel/chosen"
}

# Unpacks the newest kernel of the line into the folder `kernel`, unless it has one with these parts.
kernel() {
    local package deb folder
    [ "$(cat "$kernel/parts" 2>/dev/null)" != "${parts[*]}" ] || return 0
    # shellcheck disable=SC2086
    open "$apt_root" $suites
    package=$(apt apt-cache pkgnames linux-image- | newest "$debian")
    [ -n "$package" ] || die "$suites has no kernel $version"
    echo "    download and unpack $package" >&2
    rm -rf "$kernel"
    mkdir -p "$kernel"
    for package in $(packages "$package"); do
        # Old lists may name files that the mirror has replaced.
        (cd "$kernel" && { apt apt-get -qq download "$package" 2>/dev/null ||
            { apt apt-get -qq update && apt apt-get -qq download "$package"; }; }) >&2
        deb=$(echo "$kernel/${package}"_*.deb)
        unpack "$deb"
        rm "$deb"
    done
    for folder in "$kernel"/{usr/,}lib/modules/*/; do
        [ ! -d "$folder" ] || depmod -b "${folder%lib/modules/*}" "$(basename "$folder")"
    done
    # Written last: the folder is complete.
    echo "${parts[*]}" >"$kernel/parts"
}

# Unpacks packages ($2, and those that they need) into the folder $1. `open` has set where they are from.
userland() {
    local deb
    # Merged /usr, as in every Debian release since 2023; packages use either path.
    mkdir -p "$1"/usr/{bin,sbin,lib,lib64}
    ln -sfn usr/bin usr/sbin usr/lib usr/lib64 "$1"
    # shellcheck disable=SC2086
    apt apt-get -qq -y --no-install-recommends --download-only install $2 >&2
    for deb in "$archive"/cache/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$1" --keep-directory-symlink --exclude ./usr/share
    done
    ln -sf busybox "$1/bin/sh"
}

# Copies programs of this machine with the libraries that they link to; a static program has none.
with_libraries() {
    local file
    for file; do
        { ldd "$file" 2>/dev/null || true; } | { grep -o '/[^ ]*' || true; } | xargs -r cp -L --parents -t "$root"
    done
}

# Writes the initramfs: busybox, kernel modules, our programs and one init script.
initramfs() {
    local folder=$1 file number=0 name foreign
    root=$2.root
    rm -rf "$root"
    mkdir -p "$root"/{dev,proc,run,sys,tmp,modules,ballast}
    if [ -n "${DEVICES:-}" ]; then
        local tools=$cache/devices-${suites// /-}
        [ "$(cat "$tools.packages" 2>/dev/null)" = "$device_packages" ] || {
            # shellcheck disable=SC2086
            open "$apt_root" $suites
            rm -rf "$tools"
            userland "$tools" "$device_packages"
            echo "$device_packages" >"$tools.packages"
        }
        cp -a "$tools/." "$root"
        cp "$DEVICES" "$(dirname "$DEVICES")/lab.sh" "$root/ballast"
        printf %s "${DEVICES_WANTED:-}" >"$root/ballast/wanted"
        modules+=" $device_modules"
    elif [ "$arch" = "$(uname -m)" ]; then
        mkdir -p "$root"/bin "$root"/usr/sbin
        cp -L "$(command -v busybox)" "$root/bin/busybox"
        # busybox's shell prefers its own `ip` to the one in PATH; a plain shell does not.
        cp -L "$(command -v sh)" "$root/bin/sh"
        cp -L "$(command -v ip)" "$(command -v tc)" "$root/usr/sbin"
        with_libraries /bin/sh "$(command -v busybox)" "$(command -v ip)" "$(command -v tc)" "$ballast" "$netns"
    else
        # The C library is that of the Debian release that the cross compiler is from.
        foreign=$cache/userland-$(field / VERSION_CODENAME)-$debian
        [ -e "$foreign/bin/sh" ] || (
            distribution=debian
            open / "$(field / VERSION_CODENAME)"
            userland "$foreign" 'busybox-static iproute2'
        )
        cp -a "$foreign/." "$root"
    fi
    cp "$ballast" "$root/ballast/ballast"
    cp "$netns" "$root/ballast/netns"
    # A small virtual machine keeps the files in memory.
    "${STRIP:-strip}" --strip-debug "$root"/ballast/{ballast,netns}
    for file in $(load_order "$modules" <"$folder/modules.dep"); do
        # Uncompressed, because busybox cannot read xz.
        name=$((number++))-$(basename "${file%.xz}")
        if [[ $file == *.xz ]]; then xz -dc "$folder/$file" >"$root/modules/$name"; else cp "$folder/$file" "$root/modules/$name"; fi
    done
    cat >"$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin 2>/dev/null
export PATH=/usr/sbin:/sbin:/usr/bin:/bin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
ip link set lo up
for module in $(ls /modules | sort -n); do insmod /modules/$module; done
echo booted: $(uname -r)
if [ -e /ballast/devices.sh ]; then
    # No devices that the kernel adds to each namespace by itself.
    echo 1 >/proc/sys/net/core/fb_tunnels_only_for_init_net
    bash -c 'mapfile -t wanted </ballast/wanted; exec bash /ballast/devices.sh /ballast/ballast /ballast/netns "${wanted[@]}"'
else
    BALLAST_BIN=/ballast/ballast BALLAST_OWN_CLOCK=1 RUST_BACKTRACE=1 /ballast/netns --kernel-smoke
fi
echo ballast-kernel-test-status $?
poweroff -f
INIT
    chmod +x "$root/init"
    (cd "$root" && find . | cpio --quiet -o -H newc) >"$2"
    rm -rf "$root"
}

# The tests call single functions.
if [ "${BASH_SOURCE[0]}" != "$0" ]; then return; fi
arch=$2 apt_root=$3 cache=$4 ballast=$5 netns=$6 initramfs=$7
case $arch in x86_64) debian=amd64 ;; *) debian=arm64 ;; esac
line "$1"
kernel=$cache/kernels/$1-$debian
exec 9>"$cache/kernels.lock"
flock 9
kernel
for folder in "$kernel"/{usr/,}lib/modules/*; do
    release=$(basename "$folder")
    [ -e "$folder/modules.dep" ] || continue
    # Since 7.2, Debian keeps the image beside the modules.
    for image in "$kernel/boot/vmlinuz-$release" "$folder/vmlinuz"; do
        [ -e "$image" ] || continue
        initramfs "$folder" "$initramfs"
        printf '%s\n' "$image" "$release"
        exit
    done
done
die "the packages of $1 hold no kernel with modules: \`rm -r $kernel\` for a new download"
