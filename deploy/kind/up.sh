#!/usr/bin/env bash
# Creates a kind cluster with Ballast as its only proxy, and waits until it works.
#
#   up.sh [--name NAME] [--archive FILE] [--node-image IMAGE]
#   up.sh --down [--name NAME]
#
# --archive     the image archive of `cargo xtask image`; built if not given
# --node-image  node image, which selects the Kubernetes version, like kindest/node:v1.34.0
#
# The nodes are containers of docker, podman or nerdctl: kind takes the first one that it finds, or the one that
# KIND_EXPERIMENTAL_PROVIDER names.
set -euo pipefail

name=ballast archive='' node_image='' down=''
while (($#)); do
    case $1 in
        --name) name=$2; shift ;;
        --archive) archive=$2; shift ;;
        --node-image) node_image=$2; shift ;;
        --down) down=yes ;;
        *) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
    esac
    shift
done

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
for program in kind kubectl helm; do
    command -v "$program" >/dev/null || { echo "up.sh: $program is needed" >&2; exit 1; }
done
if [[ $down ]]; then
    exec kind delete cluster --name "$name"
fi

if [[ ! $archive ]]; then
    (cd "$root" && cargo xtask image)
    # The newest file is the archive that was just built: there is one version and one architecture.
    archive=$(find "$root/target/image" -name 'ballast-*.tar' -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2-)
fi

# No `--wait`: nodes become ready with their network, which kind's CNI plugin sets up without Services.
kind create cluster --name "$name" --config "$here/cluster.yaml" ${node_image:+--image "$node_image"}
kind load image-archive --name "$name" "$archive"

# Nodes resolve the name of the control plane's container, and the API server's certificate is valid for that name.
helm --kube-context "kind-$name" install ballast "$root/deploy/chart" --namespace kube-system \
    --values "$here/values.yaml" --set "apiServer.host=$name-control-plane"

kubectl --context "kind-$name" wait --for=condition=Ready nodes --all --timeout=3m
# Not `helm --wait`, which lets as many agents be missing as an update may stop.
kubectl --context "kind-$name" -n kube-system rollout status daemonset/ballast --timeout=3m
kubectl --context "kind-$name" -n kube-system rollout status deployment/coredns --timeout=3m
kubectl --context "kind-$name" -n kube-system exec daemonset/ballast -- ballast status
