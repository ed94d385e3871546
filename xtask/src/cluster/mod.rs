//! `cargo xtask test cluster`: a real Kubernetes cluster on this machine, without Docker.
//!
//! Each machine is a set of namespaces (`machine`). The programs are built from pinned sources, once.

mod args;
mod ballast;
mod cni;
mod control;
mod deployed;
pub mod faults;
mod image;
mod kubeadm;
mod machine;
mod migration;
mod node;
mod parts;
pub mod plan;
mod proxy;
mod workdir;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::exec::{self, Cmd};
use crate::workspace::Workspace;
use crate::{log, signal};
use args::Action;
pub use args::{Args, Up, Which};
use ballast::Ballast;
pub use ballast::Given;
pub use cni::Cni;
use cni::current_cni;
pub use control::{apply, apply_text, kubectl};
pub use deployed::logs as agent_logs;
pub use parts::down;
use parts::{batch, copy_ballast, link_programs, or_leave, prepare};
use plan::{API_SERVICE, CONTROL_V4, CONTROL_VIP, Node, SECOND_V4, each};
pub use proxy::Proxy;
use proxy::{PROXY, current_proxy};
pub use workdir::Workdir;

/// Time limit for nodes and DNS to be ready, also on a busy machine.
const PATIENCE: Duration = Duration::from_mins(3);
/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    exec::require_root("create the namespaces of the nodes", "test cluster ...")?;
    match &args.command {
        Action::Up(wanted) => {
            signal::catch();
            let (workdir, ballast) = begin(wanted)?;
            or_leave(&workdir, || assemble(&workdir, wanted, &ballast))?;
            status(&workdir)
        }
        Action::Down(which) => down(&Workdir::of(&which.name)?),
        Action::Status(which) => status(&there(which)?),
        Action::Proxy { proxy, given, which } => change_proxy(&there(which)?, *proxy, given),
        Action::Load { archive, which } => {
            let (workdir, archive) = (there(which)?, archive.canonicalize().context("no such archive")?);
            workdir.nodes().into_iter().try_for_each(|node| node::load(&workdir, node, &archive))
        }
        Action::Exec { on, which, command } => {
            let words: Vec<_> = command.iter().map(String::as_str).collect();
            machine::Machine::of(&there(which)?, on).command(&words).run()
        }
        Action::Faults { args, which } => {
            signal::catch();
            faults::run(&there(which)?, args)
        }
        Action::Chaos { args, which } => {
            signal::catch();
            faults::chaos(&there(which)?, args)
        }
        Action::Rolling { args, which } => {
            signal::catch();
            faults::rolling(&there(which)?, args)
        }
        Action::Soak { args, which } => {
            signal::catch();
            faults::soak(&there(which)?, args)
        }
        Action::Kubeadm { migrate, given, which } => {
            signal::catch();
            kubeadm::run(&Workdir::of(&which.name)?, given, *migrate)
        }
        Action::Knock { targets } => faults::load(targets),
        Action::Init { machine, which } => machine::init(&Workdir::of(&which.name)?, machine),
    }
}

/// Returns the place of a cluster; an error if there is no such cluster.
pub fn there(which: &Which) -> Result<Workdir> {
    let workdir = Workdir::of(&which.name)?;
    if !workdir.exists() {
        bail!("no cluster `{}` is running: create it with `cargo xtask test cluster up`", which.name);
    }
    Ok(workdir)
}

/// Creates a cluster. After a failure the incomplete cluster stays: the caller reads its logs and calls [`down`].
pub fn up(wanted: &Up) -> Result<Workdir> {
    let (workdir, ballast) = begin(wanted)?;
    assemble(&workdir, wanted, &ballast)?;
    Ok(workdir)
}

/// Builds what a cluster needs, and makes its place.
fn begin(wanted: &Up) -> Result<(Workdir, Ballast)> {
    let workspace = Workspace::find()?;
    let workdir = Workdir::of(&wanted.which.name)?;
    prepare(&workspace)?;
    let ballast = wanted.given.complete(&workspace, wanted.proxy)?;
    workdir.make()?;
    Ok((workdir, ballast))
}

fn assemble(workdir: &Workdir, wanted: &Up, ballast: &Ballast) -> Result<()> {
    let (workspace, start) = (Workspace::find()?, Instant::now());
    log::step(format_args!("make {} nodes, in {}", wanted.nodes, workdir.dir().display()));
    workdir.write(workdir::SETTINGS, &wanted.settings.join("\n"))?;
    link_programs(&workspace, workdir, &ballast.program)?;
    wanted.cni.prepare(&workspace, workdir)?;
    keys(workdir, wanted.nodes)?;
    let archive = image::make(workdir)?;
    let control = workdir.control();
    control.start()?;
    let nodes: Vec<_> = Node::first(wanted.nodes).collect();
    let mut started = Vec::new();
    for &node in &nodes {
        let machine = workdir.node(node);
        machine.start()?;
        started.push((node, machine.pid().context("a node exited immediately")?));
    }
    // ip(8) gets the netns of a peer device as a PID of the host, so it cannot run in the machine's PID namespace.
    let inside = control.pid().context("the machine `control` exited immediately")?;
    batch(inside, &plan::control_lines(&started))?;
    for &(node, pid) in &started {
        batch(pid, &plan::node_lines(node))?;
    }
    log::step("start the control plane");
    control::start(workdir)?;
    apply(
        workdir,
        &serde_json::json!({
            "apiVersion": "v1",
            "kind": "List",
            "items": nodes.iter().map(|node| node::object(*node)).collect::<Vec<_>>(),
        }),
    )?;
    log::step("start the nodes");
    each(&nodes, |node| node::start(workdir, node, &archive))?;
    log::step(format_args!("CNI plugin: {}", wanted.cni));
    wanted.cni.start(workdir)?;
    log::step(format_args!("proxy: {}", wanted.proxy));
    wanted.proxy.start(&workspace, workdir, ballast.image.as_deref())?;
    workdir.write(PROXY, &wanted.proxy.to_string())?;
    apply_text(workdir, &control::dns())?;
    await_ready(workdir, wanted)?;
    log::line(format_args!("    the cluster took {}", log::seconds(start.elapsed())));
    Ok(())
}

/// Creates the keys, the tokens and the kubeconfig files.
fn keys(workdir: &Workdir, nodes: u8) -> Result<()> {
    let service = "kubernetes.default.svc";
    let names = format!(
        "DNS:kubernetes,DNS:kubernetes.default,DNS:{service},DNS:{service}.cluster.local,DNS:localhost,IP:127.0.0.1,\
         IP:{CONTROL_V4},IP:{SECOND_V4},IP:{CONTROL_VIP},IP:{API_SERVICE}"
    );
    let nodes = Node::first(nodes).map(|node| node.to_string());
    Workdir::script("keys.sh")?.arg(workdir.dir()).args([CONTROL_V4, &names]).args(nodes).read().map(|_| ())
}

fn await_ready(workdir: &Workdir, wanted: &Up) -> Result<()> {
    log::step("wait until all is ready");
    let is_ready = r#"{range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}"#;
    let get = ["get", "nodes", "-o", &format!("jsonpath={is_ready}")];
    signal::wait_for("the nodes to be ready", PATIENCE, || {
        let output = kubectl(workdir, &get).try_read().unwrap_or_default();
        Ok((output.lines().filter(|line| *line == "True").count() == usize::from(wanted.nodes)).then_some(()))
    })?;
    if wanted.proxy == Proxy::None {
        return Ok(());
    }
    let get = ["get", "deployment", "-n", "kube-system", "coredns", "-o", "jsonpath={.status.readyReplicas}"];
    signal::wait_for("the cluster's DNS", PATIENCE, || {
        let output = kubectl(workdir, &get).try_read().unwrap_or_default();
        Ok((output.trim() == "2").then_some(()))
    })
    .inspect_err(|_| {
        let events = ["get", "events", "-A", "--field-selector", "type=Warning"];
        for question in [&["get", "pods", "-A", "-o", "wide"] as &[_], &events] {
            log::line(format_args!(
                "{}",
                kubectl(workdir, question).try_read().unwrap_or_default().trim_end()
            ));
        }
    })
}

/// Stops the current proxy and starts another, or the same one with the given files.
pub fn change_proxy(workdir: &Workdir, proxy: Proxy, given: &Given) -> Result<()> {
    let old = current_proxy(workdir)?;
    if old == proxy && !given.is_given() {
        return Ok(());
    }
    let workspace = Workspace::find()?;
    let (program, image) = given.replacement(&workspace, proxy)?;
    old.stop(&workspace, workdir)?;
    // If the start fails, the cluster has no proxy.
    workdir.write(PROXY, &Proxy::None.to_string())?;
    if let Some(program) = program {
        copy_ballast(workdir, &program)?;
    }
    proxy.start(&workspace, workdir, image.as_deref())?;
    workdir.write(PROXY, &proxy.to_string())?;
    log::line(format_args!("proxy: {proxy}, before: {old}"));
    Ok(())
}

fn status(workdir: &Workdir) -> Result<()> {
    let (proxy, cni) = (current_proxy(workdir)?, current_cni(workdir)?);
    let running = |machine: &machine::Machine, programs: &[&'static str]| {
        let shown = |program: &&str| {
            format!("{program}{}", if machine.is_running(program) { "" } else { " (ended)" })
        };
        programs.iter().map(shown).collect::<Vec<_>>().join(", ")
    };
    log::line(format_args!("cluster:    {}", workdir.name()));
    let pods =
        if proxy == Proxy::Ballast { format!(" ({})", deployed::summary(workdir)?) } else { String::new() };
    log::line(format_args!("proxy:      {proxy}{pods}"));
    log::line(format_args!("CNI plugin: {cni}"));
    log::line(format_args!("control:    {}", running(&workdir.control(), &control::PROGRAMS)));
    for node in workdir.nodes() {
        let programs: Vec<_> =
            node::PROGRAMS.into_iter().chain(cni.program()).chain(proxy.program()).collect();
        log::line(format_args!("{node}:      {}", running(&workdir.node(node), &programs)));
    }
    log::line(format_args!("kubeconfig: {}", workdir.kubeconfig("admin").display()));
    log::line(format_args!("logs:       {}", workdir.logs().display()));
    let dir = workdir.dir().display();
    log::line(format_args!("on it:      {dir}/control kubectl get pods -A; {dir}/node1 ballast status"));
    Cmd::new(workdir.control().script()).args(["kubectl", "get", "nodes", "-o", "wide"]).run()
}
