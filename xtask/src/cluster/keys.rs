//! Identities in the cluster: one CA, the API server's certificate, and a token for every other user.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context as _, Result};

use super::plan::{API_SERVICE, CONTROL_V4, CONTROL_VIP, Node, SECOND_V4};
use super::workdir::Workdir;
use crate::exec::Cmd;

/// A user, and the group that gives it its permissions.
struct User {
    file: String,
    name: String,
    group: &'static str,
}

fn users(nodes: u8) -> Vec<User> {
    let fixed = [
        ("admin", "admin", "system:masters"),
        ("controller-manager", "system:kube-controller-manager", ""),
        ("scheduler", "system:kube-scheduler", ""),
        // The user of kube-proxy and of Ballast; a role that every cluster has gives its permissions.
        ("proxy", "system:kube-proxy", ""),
        // The users of CNI plugins' daemons, which get their permissions with the plugin.
        ("flannel", "flannel", ""),
        ("kube-router", "kube-router", ""),
        ("calico-node", "calico-node", ""),
        ("calico-cni-plugin", "calico-cni-plugin", ""),
        ("cilium", "cilium", ""),
        ("cilium-operator", "cilium-operator", ""),
    ];
    let fixed = fixed.map(|(file, name, group)| User { file: file.into(), name: name.into(), group });
    let kubelets = Node::first(nodes).map(|node| User {
        file: node.to_string(),
        name: format!("system:node:{node}"),
        group: "system:nodes",
    });
    fixed.into_iter().chain(kubelets).collect()
}

/// Creates the keys, the tokens and the kubeconfig files.
pub fn make(workdir: &Workdir, nodes: u8) -> Result<()> {
    let path = |name: &str| workdir.key(name).display().to_string();
    let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"];
    let openssl = |words: &[&str]| Cmd::new("openssl").arg("req").args(curve).args(words).read();
    openssl(&["-x509", "-subj", "/CN=ballast-cluster", "-keyout", &path("ca.key"), "-out", &path("ca.crt")])?;
    let names = format!(
        "subjectAltName=DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,\
         DNS:kubernetes.default.svc.cluster.local,DNS:localhost,IP:127.0.0.1,IP:{CONTROL_V4},IP:{SECOND_V4},IP:{CONTROL_VIP},IP:{API_SERVICE}"
    );
    let authority = ["-CA", &path("ca.crt"), "-CAkey", &path("ca.key")];
    let server = ["-subj", "/CN=kube-apiserver", "-keyout", &path("server.key"), "-out", &path("server.crt")];
    let leaf = ["-x509", "-addext", &names, "-addext", "basicConstraints=critical,CA:FALSE"];
    openssl(&[&authority[..], &server, &leaf].concat())?;
    let sa =
        ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", &path("accounts.key")];
    Cmd::new("openssl").args(sa).read()?;
    let public = ["pkey", "-in", &path("accounts.key"), "-pubout", "-out", &path("accounts.pub")];
    Cmd::new("openssl").args(public).read()?;

    let mut tokens = String::new();
    for user in users(nodes) {
        let token = Cmd::new("openssl").args(["rand", "-hex", "24"]).read()?;
        // The last field contains the groups; without groups, the field must be absent.
        let groups = if user.group.is_empty() { String::new() } else { format!(",\"{}\"", user.group) };
        let _ = writeln!(tokens, "{},{},{}{groups}", token.trim(), user.name, user.file);
        let text = kubeconfig(&path("ca.crt"), token.trim());
        workdir.write(&format!("{}.conf", user.file), &text)?;
    }
    fs::write(workdir.key("tokens.csv"), tokens).context("cannot write the tokens")
}

fn kubeconfig(authority: &str, token: &str) -> String {
    format!(
        "apiVersion: v1
kind: Config
clusters:
  - name: ballast
    cluster: {{ server: \"https://{CONTROL_V4}:6443\", certificate-authority: \"{authority}\" }}
users:
  - name: user
    user: {{ token: \"{token}\" }}
contexts:
  - name: ballast
    context: {{ cluster: ballast, user: user }}
current-context: ballast
"
    )
}
