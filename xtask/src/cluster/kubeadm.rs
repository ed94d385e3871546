//! `cargo xtask test cluster kubeadm`: creates a cluster with the real kubeadm but without kube-proxy; Ballast's chart serves
//! its Services from the start. With `--migrate`, kubeadm installs kube-proxy, and the commands of docs/migration.md replace it
//! and bring it back. Images are built here; nothing is pulled.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::ballast::{Ballast, Given};
use super::cni::Cni;
use super::machine::Machine;
use super::parts::{batch, link_programs, prepare};
use super::plan::{self, API_SERVICE, DNS_SERVICE, Node, POD_RANGES, SERVICE_RANGES, each};
use super::proxy::{PROXY, Proxy};
use super::workdir::{self, Workdir};
use super::{control, deployed, image, migration, node};
use crate::chart::Helm;
use crate::exec::Cmd;
use crate::workspace::Workspace;
use crate::{gotools, log, signal};

/// Time limit of each wait; kubeadm's own limit for the API server is four minutes.
pub(super) const PATIENCE: Duration = Duration::from_mins(5);
/// The node of the control plane, and a node that joins.
pub(super) const NODES: [Node; 2] = [Node(1), Node(2)];
pub(super) const ADMIN: &str = "/etc/kubernetes/admin.conf";
/// Programs of the control plane, each in an image of the same name.
const STATIC: [&str; 4] = ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd"];
/// Name of kube-proxy's program and of its `DaemonSet`.
const KUBE_PROXY: &str = "kube-proxy";
/// Preflight checks that fail in a namespace on a shared machine, or without systemd.
const IGNORED: &str = "SystemVerification,Swap,Mem,NumCPU,Hostname";

/// Creates the cluster, checks its Services from both nodes, and keeps it: `cargo xtask test cluster down` removes it.
pub fn run(workdir: &Workdir, given: &Given, migrates: bool) -> Result<()> {
    let workspace = Workspace::find()?;
    prepare(&workspace)?;
    let kubeadm = gotools::build(&workspace, &[gotools::KUBEADM])?;
    let kubeadm = kubeadm.first().context("kubeadm was not built")?;
    let ballast = given.complete(&workspace, Proxy::Ballast)?;
    workdir.make()?;
    super::parts::or_leave(workdir, || assemble(&workspace, workdir, kubeadm, &ballast, migrates))
}

fn assemble(
    workspace: &Workspace,
    workdir: &Workdir,
    kubeadm: &Path,
    ballast: &Ballast,
    migrates: bool,
) -> Result<()> {
    workdir.write(workdir::SETTINGS, "")?;
    workdir.write(PROXY, &Proxy::None.to_string())?;
    Cni::Bridge.prepare(workspace, workdir)?;
    let images = programs(workspace, workdir, kubeadm, ballast, migrates)?;
    start_machines(workdir)?;
    each(&NODES, |on| {
        node::start_containerd(workdir, on)?;
        images.iter().try_for_each(|archive| node::load(workdir, on, archive))?;
        own_etc(&workdir.node(on))?;
        start_kubelet(&workdir.node(on))
    })?;
    let begun = Instant::now();
    init(workspace, workdir, migrates)?;
    configure_dns(workdir)?;
    log::line(format_args!("    kubeadm init: {}", log::seconds(begun.elapsed())));
    if migrates {
        join(workdir)?;
        ready(workdir, "daemonset", KUBE_PROXY)?;
        ready(workdir, "deployment", "coredns")?;
        return migration::run(workspace, workdir);
    }
    install(workspace, workdir)?;
    join(workdir)?;
    ready(workdir, "daemonset", deployed::NAME)?;
    look(workdir)?;
    log::line(format_args!("    from kubeadm init on: {}", log::seconds(begun.elapsed())));
    Ok(())
}

fn programs(
    workspace: &Workspace,
    workdir: &Workdir,
    kubeadm: &Path,
    ballast: &Ballast,
    migrates: bool,
) -> Result<Vec<PathBuf>> {
    link_programs(workspace, workdir, &ballast.program)?;
    workdir.link("kubeadm", kubeadm)?;
    let version = gotools::version(workspace, &gotools::KUBEADM)?;
    let config = workdir.write("kubeadm.yaml", &configuration(&version))?;
    let list = Cmd::new(kubeadm).args(["config", "images", "list", "--config"]).arg(config).read()?;
    let mut images = vec![image::make(workdir)?];
    let all: Vec<_> = list.split_whitespace().collect();
    for program in STATIC.into_iter().chain(migrates.then_some(KUBE_PROXY)) {
        let named = all.iter().find(|name| name.contains(&format!("/{program}:")));
        let named = named.with_context(|| format!("kubeadm names no image of {program}: {list}"))?;
        images.push(image::make_of(workdir, program, named)?);
    }
    images.extend(ballast.image.clone());
    Ok(images)
}

fn start_machines(workdir: &Workdir) -> Result<()> {
    let control = workdir.control();
    control.start()?;
    let mut started = Vec::new();
    for on in NODES {
        workdir.node(on).start()?;
        started.push((on, workdir.node(on).pid().context("a node exited immediately")?));
    }
    batch(
        control.pid().context("the machine `control` exited immediately")?,
        &plan::control_lines(&started),
    )?;
    started.iter().try_for_each(|&(on, pid)| batch(pid, &plan::node_lines(on)))?;
    Cni::Bridge.start(workdir)
}

/// Gives the node its own `/etc`: an overlay that takes what kubeadm writes there.
fn own_etc(machine: &Machine) -> Result<()> {
    let folder = |name: &str| {
        let path = machine.dir().join(name);
        fs_err::create_dir_all(&path)?;
        Ok::<_, anyhow::Error>(path.display().to_string())
    };
    let options = format!("lowerdir=/etc,upperdir={},workdir={}", folder("etc")?, folder("etc-work")?);
    machine.command(&["mount", "-t", "overlay", "overlay", "-o", &options, "/etc"]).read().map(|_| ())
}

/// Restarts the kubelet whenever it ends, with the flags that kubeadm writes, as systemd does with the unit of kubeadm's
/// packages.
fn start_kubelet(machine: &Machine) -> Result<()> {
    let script = "while sleep 0.2; do test -s /var/lib/kubelet/kubeadm-flags.env || continue; \
                  . /var/lib/kubelet/kubeadm-flags.env; \
                  kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf \
                  --kubeconfig=/etc/kubernetes/kubelet.conf --config=/var/lib/kubelet/config.yaml \
                  $KUBELET_KUBEADM_ARGS; done";
    machine.run("kubelet", &["sh", "-c", script])
}

fn configuration(version: &str) -> String {
    let own = include_str!("../../tools/cluster/kubeadm.yaml")
        .replace("ADDRESS", &NODES[0].v4())
        .replace("REGISTRATION", &registration(NODES[0]))
        .replace("VERSION", version)
        .replace("PODS", POD_RANGES)
        .replace("SERVICES", SERVICE_RANGES);
    own + node::KUBELET
}

fn registration(on: Node) -> String {
    format!(
        "{{ name: {on}, criSocket: \"unix://{}\", imagePullPolicy: Never, taints: [], \
         kubeletExtraArgs: [{{ name: node-ip, value: \"{},{}\" }}] }}",
        node::SOCKET,
        on.v4(),
        on.v6()
    )
}

fn kubeadm(workdir: &Workdir, on: Node, words: &[&str]) -> Result<()> {
    let ignored = format!("--ignore-preflight-errors={IGNORED}");
    let log = workdir.node(on).log("kubeadm");
    let done = workdir.node(on).command(&[&["kubeadm"], words, &[&ignored]].concat()).read();
    let output = done.as_ref().map_or_else(|error| format!("{error:#}"), Clone::clone);
    fs_err::write(&log, output)?;
    done.map(|_| ()).with_context(|| format!("see {} and the other logs in that folder", log.display()))
}

fn init(workspace: &Workspace, workdir: &Workdir, has_kube_proxy: bool) -> Result<()> {
    let config = workdir.dir().join("kubeadm.yaml").display().to_string();
    ensure!(gotools::version(workspace, &gotools::KUBEADM)?.starts_with('v'), "kubeadm has no version");
    let skipped = (!has_kube_proxy).then_some("--skip-phases=addon/kube-proxy");
    let words: Vec<_> = ["init"].into_iter().chain(skipped).chain(["--config", &config]).collect();
    log::step(format_args!("kubeadm {}", words.join(" ")));
    kubeadm(workdir, NODES[0], &words)
}

/// Replaces the configuration of `CoreDNS`: kubeadm's names plugins that the DNS server of the image lacks.
fn configure_dns(workdir: &Workdir) -> Result<()> {
    let objects = control::dns();
    let config = objects.split("---\n").find(|object| object.contains("kind: ConfigMap"));
    let file = workdir.write("corefile.yaml", config.context("no configuration")?)?;
    kubectl(workdir, &["apply", "-f", &file.display().to_string()]).read()?;
    kubectl(workdir, &["rollout", "restart", "deployment/coredns", "-n", deployed::SPACE]).read().map(|_| ())
}

/// Returns a command that runs kubectl as kubeadm's administrator, on the node of the control plane.
pub(super) fn kubectl(workdir: &Workdir, words: &[&str]) -> Cmd {
    workdir.node(NODES[0]).command(&[&["kubectl", "--kubeconfig", ADMIN], words].concat())
}

/// Installs Ballast's chart as docs/quickstart.md describes.
fn install(workspace: &Workspace, workdir: &Workdir) -> Result<()> {
    log::step("helm install");
    let helm = Helm::find(workspace)?;
    let chart = helm.chart().display().to_string();
    let address = format!("apiServer.host={}", NODES[0].v4());
    let words = ["install", deployed::NAME, &chart, "--namespace", deployed::SPACE, "--set", &address];
    let there = workdir.node(NODES[0]).command(&["env", &format!("KUBECONFIG={ADMIN}")]);
    helm.on_cluster(there, &words).read()?;
    ready(workdir, "daemonset", deployed::NAME)
}

fn ready(workdir: &Workdir, kind: &str, name: &str) -> Result<()> {
    let object = format!("{kind}/{name}");
    kubectl(workdir, &["rollout", "status", &object, "-n", deployed::SPACE, "--timeout=180s"])
        .read()
        .map(|_| ())
}

fn join(workdir: &Workdir) -> Result<()> {
    log::step("kubeadm join");
    let token =
        workdir.node(NODES[0]).command(&["kubeadm", "token", "create", "--print-join-command"]).read()?;
    let words: Vec<_> = token.split_whitespace().collect();
    let value = |flag: &str| {
        let at = words.iter().position(|word| *word == flag)?;
        words.get(at + 1).copied()
    };
    let (Some(server), Some(secret), Some(hash)) =
        (words.get(2), value("--token"), value("--discovery-token-ca-cert-hash"))
    else {
        bail!("kubeadm printed no command: {token}");
    };
    let on = NODES[1];
    let config = format!(
        "apiVersion: kubeadm.k8s.io/v1beta4\nkind: JoinConfiguration\nnodeRegistration: {}\ndiscovery:\n  \
         bootstrapToken: {{ apiServerEndpoint: \"{server}\", token: \"{secret}\", caCertHashes: [\"{hash}\"] }}\n",
        registration(on)
    );
    let file = workdir.write("kubeadm-join.yaml", &config)?.display().to_string();
    kubeadm(workdir, on, &["join", "--config", &file])?;
    signal::wait_for("both nodes to be ready", PATIENCE, || {
        let output = kubectl(workdir, &["get", "nodes", "--no-headers"]).try_read().unwrap_or_default();
        Ok((output.matches(" Ready ").count() == NODES.len()).then_some(()))
    })
}

/// Checks that there is no kube-proxy and that Services work on both nodes: the API server's and DNS, for processes of the
/// node and for pods.
fn look(workdir: &Workdir) -> Result<()> {
    log::step("look at its Services");
    ready(workdir, "deployment", "coredns")?;
    let sets =
        kubectl(workdir, &["get", "daemonset,configmap", "-n", deployed::SPACE, "-o", "name"]).read()?;
    ensure!(!sets.contains("kube-proxy"), "kubeadm installed kube-proxy:\n{sets}");
    let api = format!("https://{API_SERVICE}/livez");
    let server = format!("@{DNS_SERVICE}");
    for on in NODES {
        let machine = workdir.node(on);
        let rules = machine.command(&["sh", "-c", "iptables-save; nft list ruleset"]).read()?;
        ensure!(!rules.contains("KUBE-SVC") && !rules.contains("kube-proxy"), "{on} has rules of kube-proxy");
        let output = signal::wait_for("the API server's Service", PATIENCE, || {
            Ok(machine.command(&["curl", "-sk", "-m", "2", &api]).try_read())
        })?;
        let name = "kubernetes.default.svc.cluster.local";
        let found = machine.command(&["dig", "+short", "+time=2", &server, name]).read()?;
        ensure!(found.trim() == API_SERVICE, "{on}: DNS says `{}`", found.trim());
        log::line(format_args!("    {on}: {api}: {output}; {name}: {}", found.trim()));
    }
    let nodes = kubectl(workdir, &["get", "nodes", "-o", "wide", "--no-headers"]).read()?;
    let pods = kubectl(workdir, &["get", "pods", "-A", "-o", "wide", "--no-headers"]).read()?;
    log::line(format_args!("{nodes}{}", pods.trim_end()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn configuration_has_a_part_for_each_component() {
        let text = configuration("v1.37.2");
        let parts: Vec<Value> =
            text.split("\n---\n").map(|part| serde_saphyr::from_str(part).unwrap()).collect();
        let kinds: Vec<_> = parts.iter().map(|part| part["kind"].as_str().unwrap()).collect();
        let own =
            ["InitConfiguration", "ClusterConfiguration", "KubeProxyConfiguration", "KubeletConfiguration"];
        assert_eq!(kinds, own);
        assert_eq!(parts[1]["kubernetesVersion"], "v1.37.2");
        assert_eq!(parts[0]["nodeRegistration"]["name"], "node1");
        assert_eq!(parts[3]["failSwapOn"], false);
    }
}
