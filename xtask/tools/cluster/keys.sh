#!/usr/bin/env bash
# keys.sh FOLDER SERVER NAMES NODE...
# Creates the identities in a cluster: one CA, the API server's certificate for NAMES, and a token and a kubeconfig for every
# other user.
set -euo pipefail

keys=$1/keys
curve=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -x509)
openssl req "${curve[@]}" -subj /CN=ballast-cluster -keyout "$keys/ca.key" -out "$keys/ca.crt"
openssl req "${curve[@]}" -subj /CN=kube-apiserver -keyout "$keys/server.key" -out "$keys/server.crt" -CA "$keys/ca.crt" \
    -CAkey "$keys/ca.key" -addext "subjectAltName=$3" -addext basicConstraints=critical,CA:FALSE
openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$keys/accounts.key"
openssl pkey -in "$keys/accounts.key" -pubout -out "$keys/accounts.pub"

# A user: its file, its name, and the group that gives it its permissions. Without groups, the field must be absent.
user() {
    local token
    token=$(openssl rand -hex 24)
    echo "$token,$2,$1${3:+,\"$3\"}" >>"$keys/tokens.csv"
    cat >"$folder/$1.conf" <<EOF
apiVersion: v1
kind: Config
clusters:
  - name: ballast
    cluster: { server: "https://$server:6443", certificate-authority: "$keys/ca.crt" }
users:
  - name: user
    user: { token: "$token" }
contexts:
  - name: ballast
    context: { cluster: ballast, user: user }
current-context: ballast
EOF
}
folder=$1 server=$2
user admin admin system:masters
user controller-manager system:kube-controller-manager
user scheduler system:kube-scheduler
# The user of kube-proxy and of Ballast; a role that every cluster has gives its permissions.
user proxy system:kube-proxy
# The users of CNI plugins' daemons: rbac.yaml.
for name in flannel kube-router calico-node calico-cni-plugin cilium cilium-operator; do user $name $name; done
for node in "${@:4}"; do user "$node" "system:node:$node" system:nodes; done
