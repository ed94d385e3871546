#!/usr/bin/env bash
# images.sh FOLDER PROGRAMS NAME IMAGE...
# Builds images from scratch, and writes them to the archive FOLDER/NAME.tar. They have one layer: for the name `images` with
# agnhost, the DNS server and the tools that the end-to-end tests call in pods; else with the program of this name. An image is
# `NAME|ENTRY POINT|ARGUMENTS`, the last two as lists in JSON.
set -euo pipefail

folder=$1 programs=$2 archive=$3
root=$folder/root
rm -rf "$root"
mkdir -p "$root"/{bin,tmp,etc}
copy() { mkdir -p "$(dirname "$2")" && cp -L "$1" "$2"; }
if [ "$archive" = images ]; then
    for name in agnhost coredns regression-issue-74839; do copy "$programs/$name" "$root/$name"; done
    copy "$(command -v busybox)" "$root/bin/busybox"
    # busybox's own shell would prefer its applets to the programs beside it.
    for applet in $(busybox --list); do
        case $applet in
            curl | nc | dig | bash | sh | wget | unshare | ash | hush | busybox) ;;
            *) ln -s busybox "$root/bin/$applet" ;;
        esac
    done
    # Programs of this machine with their libraries. The wget is GNU's: the static one of busybox cannot resolve names.
    for name in curl nc.openbsd:nc dig bash dash:sh wget unshare; do
        program=$(command -v "${name%:*}") || { echo "no ${name%:*}" >&2; exit 1; }
        copy "$program" "$root/bin/${name#*:}"
        for library in $(ldd "$program" | grep -o '/[^ ]*'); do copy "$library" "$root$library"; done
    done
else
    copy "$programs/$archive" "$root/bin/$archive"
fi

tar --sort=name --owner=0 --group=0 --numeric-owner -C "$root" -cf "$folder/layer.tar" .
digest=$(sha256sum <"$folder/layer.tar")
case $(uname -m) in aarch64) architecture=arm64 ;; *) architecture=amd64 ;; esac
parts=(manifest.json layer.tar) manifest=
for image in "${@:4}"; do
    IFS='|' read -r name entry args <<<"$image"
    config=config-${#parts[@]}.json
    echo "{ \"architecture\": \"$architecture\", \"os\": \"linux\", \"config\": { \"Env\": [\"PATH=/bin:/usr/bin:/sbin:/\"]," \
        "\"Entrypoint\": $entry, \"Cmd\": $args }," \
        "\"rootfs\": { \"type\": \"layers\", \"diff_ids\": [\"sha256:${digest%% *}\"] } }" >"$folder/$config"
    manifest+="${manifest:+, }{ \"Config\": \"$config\", \"RepoTags\": [\"$name\"], \"Layers\": [\"layer.tar\"] }"
    parts+=("$config")
done
echo "[$manifest]" >"$folder/manifest.json"
tar -C "$folder" -cf "$folder/$archive.tar" "${parts[@]}"
rm -r "$root" "$folder/layer.tar"
