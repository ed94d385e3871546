#!/usr/bin/env bash
# images.sh FOLDER PROGRAMS NAME IMAGE...
# Builds images from scratch, and writes them to the archive FOLDER/NAME.tar. They have one layer: for the name `images` with
# agnhost, the DNS server and the tools that the end-to-end tests call in pods; else with the program of this name, and what
# kube-proxy calls. An image is `NAME|ENTRY POINT|ARGUMENTS`, the last two as lists in JSON.
set -euo pipefail

folder=$1 programs=$2 archive=$3
root=$folder/root
rm -rf "$root"
mkdir -p "$root"/{bin,tmp,etc}
case $(uname -m) in aarch64) architecture=arm64 ;; *) architecture=amd64 ;; esac
copy() { mkdir -p "$(dirname "$2")" && cp -L "$1" "$2"; }
# Copies the libraries of the files.
libraries() {
    local library
    for library in $(ldd "$@" 2>/dev/null | grep -o '/[^ :]*' | sort -u); do copy "$library" "$root$library"; done
}
# Copies the program $1 of this machine with its libraries to /bin/$2.
program() {
    local file
    file=$(command -v "$1") || { echo "no $1" >&2; exit 1; }
    copy "$file" "$root/bin/$2"
    libraries "$file"
}
# Writes the files of the image into the archive $1.
pack() { tar --sort=name --owner=0 --group=0 --numeric-owner -C "$root" -cf "$1" .; }
digest() {
    local sum
    sum=$(sha256sum <"$1") && echo "${sum%% *}"
}
# Prints the configuration of an image with an entry point, arguments, and the digest of its layer.
config() {
    echo "{ \"architecture\": \"$architecture\", \"os\": \"linux\", \"config\": { \"Env\": [\"PATH=/bin:/usr/bin:/sbin:/\"]," \
        "\"Entrypoint\": $1, \"Cmd\": $2 }," \
        "\"rootfs\": { \"type\": \"layers\", \"diff_ids\": [\"sha256:$3\"] } }"
}
# Adds the image `pause:testing`, which `agnhost fake-registry-server` serves: it has the files that the image has so far.
serve() {
    local of=application/vnd.oci.image file=$folder/served layer config manifest
    # Stores the file $1 in the folder $2, where the server looks for its digest, and prints the digest.
    put() {
        local sum
        sum=$(digest "$1") && copy "$1" "$root/var/registry/pause/$2/sha256/${sum:0:2}/$sum/data" && echo "$sum"
    }
    pack "$file.tar"
    layer=$(put "$file.tar" blobs)
    config '["/bin/busybox", "sleep", "86400"]' '[]' "$layer" >"$file.json"
    config=$(put "$file.json" blobs)
    echo "{ \"schemaVersion\": 2, \"mediaType\": \"$of.manifest.v1+json\", \"config\": { \"mediaType\": \"$of.config.v1+json\"," \
        "\"digest\": \"sha256:$config\", \"size\": $(stat -c %s "$file.json") }, \"layers\": [{ \"mediaType\": \"$of.layer.v1.tar\"," \
        "\"digest\": \"sha256:$layer\", \"size\": $(stat -c %s "$file.tar") }] }" >"$file-manifest.json"
    manifest=$(put "$file-manifest.json" manifests)
    echo "sha256:$manifest" >"$root/var/registry/pause/manifests/testing"
    rm "$file.tar"
}
if [ "$archive" = images ]; then
    program busybox busybox
    serve
    for name in agnhost coredns regression-issue-74839; do copy "$programs/$name" "$root/$name"; done
    # busybox's own shell would prefer its applets to the programs beside it.
    for applet in $(busybox --list); do
        case $applet in
            curl | nc | dig | bash | sh | wget | unshare | ash | hush | busybox) ;;
            *) ln -s busybox "$root/bin/$applet" ;;
        esac
    done
    # The wget is GNU's: the static one of busybox cannot resolve names.
    for name in curl nc.openbsd:nc dig bash dash:sh wget unshare; do program "${name%:*}" "${name#*:}"; done
else
    copy "$programs/$archive" "$root/bin/$archive"
    if [ "$archive" = kube-proxy ]; then
        # The path of kubeadm's DaemonSet; and iptables, with its extensions, for the mode that kubeadm sets.
        mkdir -p "$root/usr/local/bin" && ln -s /bin/kube-proxy "$root/usr/local/bin/kube-proxy"
        for name in iptables ip6tables; do
            for part in '' -save -restore; do program "$name-nft$part" "$name$part"; done
        done
        for extensions in /usr/lib/*-linux-gnu/xtables; do
            cp -rL --parents "$extensions" "$root"
            libraries "$extensions"/*.so
        done
        program nft nft
    fi
fi

pack "$folder/layer.tar"
digest=$(digest "$folder/layer.tar")
parts=(manifest.json layer.tar) manifest=
for image in "${@:4}"; do
    IFS='|' read -r name entry args <<<"$image"
    file=config-${#parts[@]}.json
    config "$entry" "$args" "$digest" >"$folder/$file"
    manifest+="${manifest:+, }{ \"Config\": \"$file\", \"RepoTags\": [\"$name\"], \"Layers\": [\"layer.tar\"] }"
    parts+=("$file")
done
echo "[$manifest]" >"$folder/manifest.json"
tar -C "$folder" -cf "$folder/$archive.tar" "${parts[@]}"
rm -r "$root" "$folder/layer.tar"
