//! `cargo xtask cluster`: a real Kubernetes cluster on this machine, without Docker.
//!
//! Each machine of it is a set of namespaces (`machine`). All that it needs is built from pinned sources, once.

mod args;
mod ballast;
mod control;
mod deployed;
mod dns;
mod faults;
mod image;
mod keys;
mod kubeadm;
mod machine;
mod node;
mod parts;
mod place;
pub mod plan;
mod proxy;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::exec::{self, Cmd};
use crate::workspace::Workspace;
use crate::{say, signal};
use args::Action;
pub use args::{Args, Up, Which};
use ballast::Ballast;
pub use ballast::Given;
pub use control::{apply, kubectl};
pub use deployed::logs as agent_logs;
use parts::{batch, link_programs, prepare};
pub use place::Place;
use plan::Node;
use plan::each;
pub use proxy::Proxy;
use proxy::{PROXY, current_proxy};

/// How long nodes and DNS may take to be ready, also on a busy machine.
const PATIENCE: Duration = Duration::from_mins(3);
/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if !exec::is_root() {
        bail!(
            "a cluster's nodes are namespaces, which takes root: `sudo -E env \"PATH=$PATH\" cargo xtask cluster ...`"
        );
    }
    match &args.command {
        Action::Up(wanted) => {
            signal::catch();
            status(&up_or_leave(wanted)?)
        }
        Action::Down(which) => down(&Place::of(&which.name)?),
        Action::Status(which) => status(&there(which)?),
        Action::Proxy { proxy, given, which } => change_proxy(&there(which)?, *proxy, given),
        Action::Load { archive, which } => {
            let (place, archive) = (there(which)?, archive.canonicalize().context("no such archive")?);
            place.nodes().into_iter().try_for_each(|node| node::load(&place, node, &archive))
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
        Action::Kubeadm { given, which } => {
            signal::catch();
            kubeadm::run(&Place::of(&which.name)?, given)
        }
        Action::Foreign { hook } => faults::attach_foreign(hook),
        Action::Knock { targets } => faults::knock(targets),
        Action::Init { machine, which } => machine::init(&Place::of(&which.name)?, machine),
    }
}

fn there(which: &Which) -> Result<Place> {
    let place = Place::of(&which.name)?;
    if !place.exists() {
        bail!("no cluster `{}` is here: `cargo xtask cluster up`", which.name);
    }
    Ok(place)
}

/// Makes a cluster. One that fails is left for a look at its logs, unless Ctrl-C ended it.
fn up_or_leave(wanted: &Up) -> Result<Place> {
    up(wanted).inspect_err(|_| {
        let Ok(place) = Place::of(&wanted.which.name) else { return };
        if signal::check().is_err() {
            if let Err(error) = down(&place) {
                say::line(format_args!("warning: {error:#}"));
            }
        } else if place.exists() {
            say::line(format_args!(
                "the cluster is left as it is, with its logs in {}; `cargo xtask cluster down --name {}` removes it",
                place.logs().display(),
                place.name()
            ));
        }
    })
}

/// Makes a cluster. What is there of one that fails stays: the caller reads its logs and calls [`down`].
pub fn up(wanted: &Up) -> Result<Place> {
    let workspace = Workspace::find()?;
    let place = Place::of(&wanted.which.name)?;
    prepare(&workspace)?;
    let ballast = wanted.given.complete(&workspace, wanted.proxy)?;
    let start = Instant::now();
    place.make()?;
    assemble(&workspace, &place, wanted, &ballast)?;
    say::line(format_args!("    the cluster took {}", say::seconds(start.elapsed())));
    Ok(place)
}

fn assemble(workspace: &Workspace, place: &Place, wanted: &Up, ballast: &Ballast) -> Result<()> {
    say::step(format_args!("make {} nodes, in {}", wanted.nodes, place.dir().display()));
    place.write(place::SETTINGS, &wanted.settings.join("\n"))?;
    link_programs(workspace, place, &ballast.program)?;
    keys::make(place, wanted.nodes)?;
    let archive = image::make(place)?;
    let control = place.control();
    control.start()?;
    let nodes: Vec<_> = Node::first(wanted.nodes).collect();
    let mut started = Vec::new();
    for &node in &nodes {
        let machine = place.node(node);
        machine.start()?;
        started.push((node, machine.pid().context("a node ended at once")?));
    }
    // Devices of another namespace are named by its process as this machine counts, so not from inside.
    let inside = control.pid().context("the machine `control` ended at once")?;
    batch(inside, &plan::control_lines(&started))?;
    for &(node, pid) in &started {
        batch(pid, &plan::node_lines(node, &started))?;
    }
    say::step("start the control plane");
    control::start(place)?;
    apply(
        place,
        &serde_json::json!({
            "apiVersion": "v1",
            "kind": "List",
            "items": nodes.iter().map(|node| node::object(*node)).collect::<Vec<_>>(),
        }),
    )?;
    say::step("start the nodes");
    each(&nodes, |node| node::start(place, node, &archive))?;
    say::step(format_args!("proxy: {}", wanted.proxy));
    wanted.proxy.start(workspace, place, ballast.image.as_deref())?;
    place.write(PROXY, &wanted.proxy.to_string())?;
    apply(place, &dns::objects())?;
    await_ready(place, wanted)
}

fn await_ready(place: &Place, wanted: &Up) -> Result<()> {
    say::step("wait until all is ready");
    let is_ready = r#"{range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{"\n"}{end}"#;
    let get = ["get", "nodes", "-o", &format!("jsonpath={is_ready}")];
    signal::wait_for("the nodes to be ready", PATIENCE, || {
        let told = kubectl(place, &get).try_read().unwrap_or_default();
        Ok((told.lines().filter(|line| *line == "True").count() == usize::from(wanted.nodes)).then_some(()))
    })?;
    if wanted.proxy == Proxy::None {
        return Ok(());
    }
    let get = ["get", "deployment", "-n", "kube-system", "coredns", "-o", "jsonpath={.status.readyReplicas}"];
    signal::wait_for("the cluster's DNS", PATIENCE, || {
        let told = kubectl(place, &get).try_read().unwrap_or_default();
        Ok((told.trim() == "2").then_some(()))
    })
    .inspect_err(|_| {
        let events = ["get", "events", "-A", "--field-selector", "type=Warning"];
        for question in [&["get", "pods", "-A", "-o", "wide"] as &[_], &events] {
            say::line(format_args!("{}", kubectl(place, question).try_read().unwrap_or_default().trim_end()));
        }
    })
}

/// Ends a cluster and removes all of it.
pub fn down(place: &Place) -> Result<()> {
    if place.remains()?.is_empty() {
        say::line(format_args!("no cluster `{}` is here", place.name()));
        return Ok(());
    }
    place.take_down()?;
    say::line(format_args!("the cluster `{}` is gone", place.name()));
    Ok(())
}

/// Ends one proxy and starts another.
pub fn change_proxy(place: &Place, proxy: Proxy, given: &Given) -> Result<()> {
    let old = current_proxy(place)?;
    if old == proxy {
        return Ok(());
    }
    let workspace = Workspace::find()?;
    let image = given.archive(&workspace, proxy)?;
    old.stop(&workspace, place)?;
    proxy.start(&workspace, place, image.as_deref())?;
    place.write(PROXY, &proxy.to_string())?;
    say::line(format_args!("proxy: {proxy}, before: {old}"));
    Ok(())
}

fn status(place: &Place) -> Result<()> {
    let proxy = current_proxy(place)?;
    let running = |machine: &machine::Machine, programs: &[&'static str]| {
        let shown = |program: &&str| {
            format!("{program}{}", if machine.is_running(program) { "" } else { " (ended)" })
        };
        programs.iter().map(shown).collect::<Vec<_>>().join(", ")
    };
    say::line(format_args!("cluster:    {}", place.name()));
    let pods =
        if proxy == Proxy::Ballast { format!(" ({})", deployed::summary(place)?) } else { String::new() };
    say::line(format_args!("proxy:      {proxy}{pods}"));
    say::line(format_args!("control:    {}", running(&place.control(), &control::PROGRAMS)));
    for node in place.nodes() {
        let programs: Vec<_> = node::PROGRAMS.into_iter().chain(proxy.program()).collect();
        say::line(format_args!("{node}:      {}", running(&place.node(node), &programs)));
    }
    say::line(format_args!("kubeconfig: {}", place.kubeconfig("admin").display()));
    say::line(format_args!("logs:       {}", place.logs().display()));
    let dir = place.dir().display();
    say::line(format_args!("on it:      {dir}/control kubectl get pods -A; {dir}/node1 ballast status"));
    Cmd::new(place.control().script()).args(["kubectl", "get", "nodes", "-o", "wide"]).run()
}
