//! The agent: creates its parts, connects and runs them, and exits without removing programs or maps.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use kube::Client;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use crate::audit::Audits;
use crate::cli::origins::{self, Origin};
use crate::cli::variables;
use crate::config::kube_proxy::document;
use crate::config::paths::Ejection;
use crate::config::{Options, RunConfig};
use crate::driver::{Ask, Driver, DriverSettings, Programmed, Status};
use crate::host::cgroup;
use crate::host::facts::{EndsSockets, HostFacts};
use crate::host::follow::Follower;
use crate::host::netfilter::masquerade::Masquerade;
use crate::host::netns;
use crate::host::node_path::NodePath;
use crate::http::gate_state::Gate;
use crate::maps::view::{Claimed, EventHistory, View, ViewError};
use crate::maps::{KernelStore, forget};
use crate::metrics::{Metrics, recent};
use crate::otlp::record::LogRecord;
use crate::otlp::{Counts, Exporter, Queue};
use crate::page::Agent;
use crate::programs::{
    EMBEDDED, Programs, Settings, interleaves_packets, require_capabilities, require_unused,
};
use crate::sockets::rebalance::{self, Moved};
use crate::{connections, http, sockets, telemetry};
use proxy_core::model::notice::Notice;
use proxy_core::model::problem::chain;
use proxy_core::model::{ApiServers, Event, NodeView, Watches};
use proxy_core::plan::PlanSettings;
use proxy_watch::api::client::Connection;
use proxy_watch::api::connect::Address;
use proxy_watch::api::credentials;
use proxy_watch::api::fresh::Relister;

mod api_access;
mod attach;
mod config_file;
mod end_udp_sockets;
mod grow;
mod init;
mod memory;
mod notices;
mod objects;
mod otlp;
pub mod supervisor;
mod watches;

pub use api_access::{ASK, api_access};
pub use end_udp_sockets::end_udp_sockets;
pub use init::{init, write_config};
use supervisor::Supervisor;
use watches::follow;

/// The number of events that may wait for the driver. If the queue is full, the source waits, so that memory does not grow.
const QUEUE: usize = 1024;

/// The number of Kubernetes Events that may wait to be sent; further ones are lost.
const NOTICES: usize = 256;
/// How long the agent waits for the last events and telemetry to be sent before it exits.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// Returns the text of an error with its causes, each of them once.
pub fn error_text(error: &anyhow::Error) -> String {
    chain(&**error)
}

/// Adds the origins of the settings in kube-proxy's configuration file.
fn add_file(origins: &mut Vec<Origin>, config: &RunConfig) {
    let Some(path) = &config.kube_proxy.config_file else { return };
    // The file was parsed before, so parsing does not fail.
    let document = serde_saphyr::from_str(&config.kube_proxy.text).unwrap_or_default();
    origins::add_file(origins, &path.display().to_string(), &document, &config.kube_proxy.ignored_flags);
}

/// Runs the agent until it gets SIGTERM or SIGINT. Programs and maps stay in place.
///
/// `options` are what `config` was made from; `exporter` holds what was logged so far, if telemetry is exported.
pub fn run(
    options: Options,
    config: RunConfig,
    mut origins: Vec<Origin>,
    exporter: Option<Exporter>,
) -> anyhow::Result<()> {
    add_file(&mut origins, &config);
    memory::set_up();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let result = runtime.block_on(async {
        let telemetry =
            exporter.as_ref().map(|exporter| (exporter.logs.clone(), Arc::clone(&exporter.counts)));
        let running = otlp::start(exporter, &config).await;
        let result = Box::pin(serve(options, config, origins, telemetry)).await;
        if let Some(running) = running {
            running.finish(FLUSH_TIMEOUT).await;
        }
        result
    });
    // A read of the maps that takes long must not delay the exit.
    runtime.shutdown_background();
    result
}

/// Returns the addresses of the API servers.
fn servers_of(connection: Option<&Connection>) -> Vec<SocketAddr> {
    let all = connection.map(|connection| connection.servers.list()).unwrap_or_default();
    all.iter().filter_map(Address::socket).collect()
}

async fn serve(
    options: Options,
    config: RunConfig,
    origins: Vec<Origin>,
    telemetry: Option<(Queue<LogRecord>, Arc<Counts>)>,
) -> anyhow::Result<()> {
    let mut ends = Ends::listen()?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), node = config.node_name, "starting");
    init::describe(&config);
    init::describe_kube_proxy_rules().await;
    init::set_up_process(&config);
    let config = Arc::new(config);
    let (sender, events) = mpsc::channel(QUEUE);
    require_capabilities()?;
    require_whole_packets(&config)?;
    // Before anything on the node is changed: what the start needs, but the locks, which `Programs::start` takes.
    require_unused(&config.bpffs, &cgroup::find(config.cgroup_root.as_deref())?.path)?;
    let (notices, to_tell) = mpsc::channel(NOTICES);
    let (ask_for_nodes, needs_nodes) = watch::channel(None);
    let (server_status, servers) = watch::channel(ApiServers::default());
    let (report_manifests, manifests) = watch::channel(Vec::new());
    let (report_watches, watched) = watch::channel(Watches::new());
    let opening = objects::open(
        &config,
        sender.clone(),
        to_tell,
        needs_nodes,
        server_status,
        report_manifests,
        report_watches,
    );
    let Some(opened) = ends.unless(opening).await else { return Ok(()) };
    let (source, connection) = opened?;
    let sockets_stay = Arc::new(AtomicBool::new(false));
    let Some(host) = ends.unless(read_host(&config, &sender, &sockets_stay)).await else { return Ok(()) };
    let host = host?;
    // The rules that the host's facts need have loaded nf_conntrack.
    init::set_up_netfilter(&config);
    let (devices, host_due, host_problems) = (host.devices(), host.due(), host.problems());
    let host = host.run(sender);
    let mut tasks = Supervisor::default();
    // The source lists objects while programs are loaded; its events wait in the queue for the driver.
    tasks.spawn_required("source", source);
    let Some(programs) = ends.unless(start_programs(&config)).await else { return Ok(()) };
    let programs = Arc::new(programs?);
    let store = KernelStore::open(&programs.pin_dir())?;
    let settings = DriverSettings {
        min_sync_period: config.min_sync_period,
        sync_period: config.sync_period,
        plan: PlanSettings {
            strict_source_ranges: config.network.source_ranges_strict,
            vip_echo: config.node.vip_echo,
            no_external_ips: config.kube_proxy.no_external_ips,
            no_ejection: config.paths.ejection == Ejection::Off,
            algorithm: config.paths.algorithm.map(|name| name.0),
            forwarding: config.paths.forwarding_mode,
            annotations: config.paths.tenant_annotations,
            address: config.node.address,
            // Once for the process.
            api_servers: Vec::leak(servers_of(connection.as_ref())),
        },
        node: config.node.clone(),
        accept_dsr: config.paths.accept_dsr,
        slow_start: config.paths.slow_start,
        ..DriverSettings::default()
    };
    let flows = Box::new(View::open(&config.bpffs)?);
    let (ask, questions) = mpsc::channel(1);
    let ask = Ask::new(ask);
    let gate = Gate::new(config.network.gate_service.as_ref().map(|service| service.0.clone()), ask.clone());
    let driver = Driver::new(store, NodeView::new(config.node_name.clone()), settings)?;
    let mut node_path = NodePath::default();
    let driver = driver
        .with_flows(flows)
        .with_questions(questions)
        .with_node_path(Box::new(move |address| node_path.is_translated(address)));
    let (status, programmed) = (driver.status(), driver.programmed());
    let audits = Arc::new(Audits::default());
    if let Some(connection) = connection.as_ref().filter(|_| !config.api_audit_period.is_zero()) {
        tasks.spawn_optional(audit(
            connection.client.clone(),
            ask,
            Arc::clone(&config),
            status.clone(),
            Arc::clone(&audits),
        ));
    }
    let mut needs = status.clone();
    tasks.spawn_optional(async move {
        loop {
            let needed = needs.borrow_and_update().needs_nodes;
            ask_for_nodes.send_if_modified(|asked| std::mem::replace(asked, needed) != needed);
            if needs.changed().await.is_err() {
                return;
            }
        }
    });
    notices.try_send(Notice::starting()).context("the event recorder has ended")?;

    tasks.spawn_required("host", host);
    tasks.spawn_required("driver", async move {
        Box::pin(driver.run(events)).await;
    });
    let metrics = Metrics::new(&config.bpffs, status.clone(), config.page.service_metrics)
        .with_repairs(programs.repairs());
    let metrics = metrics.with_audits(audits).with_api_servers(servers, watched.clone());
    let mut metrics = metrics.with_xdp(programs.xdp_devices());
    if let Some((logs, counts)) = telemetry {
        metrics = metrics.with_telemetry(counts);
        tasks.spawn_optional(otlp::events(logs, Arc::clone(&config), status.clone()));
    }
    let metrics = Arc::new(metrics);
    let answers =
        answer(&config, &origins, status.clone(), programmed, Arc::clone(&metrics), notices.clone(), gate)?;
    tasks.spawn_fallible(async move { Ok(answers.await?) });
    metrics.recent.set_standing("environment", unknown_variables());
    let reported = Arc::clone(&metrics);
    let report = move |cause, problems| reported.recent.set_standing(cause, problems);
    let devices_without = Arc::clone(&metrics.bare);
    let bare = move |names| devices_without.set(names, Instant::now());
    let (due, devices_due) = watch::channel(None);
    let attached = attach::attach(
        Arc::clone(&programs),
        Arc::clone(&config),
        devices,
        status.clone(),
        report,
        bare,
        due,
    );
    tasks.spawn_fallible(attached);
    metrics.recent.expect_progress("the task that attaches programs to devices", devices_due);
    metrics.recent.expect_progress("the task that reads devices, addresses and routes", host_due);
    let problems =
        [("manifests", manifests), ("packet filters", programs.filters_before()), ("machine", host_problems)];
    for (part, problems) in problems {
        let reported = Arc::clone(&metrics);
        let report = move |problems: &Vec<String>| reported.recent.set_standing(part, problems.clone());
        tasks.spawn_optional(follow(problems, report));
    }
    let reported = Arc::clone(&metrics);
    let report = move |problem| reported.recent.set_standing("API server", problem);
    tasks.spawn_optional(watches::report_failing(watched, report));
    let reported = Arc::clone(&metrics);
    let report = move |problem| reported.recent.set_standing("configuration file", problem);
    tasks.spawn_fallible(config_file::until_changed(options, config.kube_proxy.text.clone(), report));
    if let Some(connection) = connection {
        let reported = Arc::clone(&metrics);
        let report = move |problem| reported.recent.set_standing("credentials", problem);
        tasks.spawn_optional(credentials::follow(connection, report));
    }
    let uplinks = programs.xdp_devices().follow();
    tasks.spawn_optional(notices::report_xdp(uplinks, config.paths.xdp, notices.clone()));
    tasks.spawn_optional(notices::report_problems(status.clone(), notices));
    tasks.spawn_optional(note_faults(Arc::clone(&metrics), config.bpffs.clone()));
    let swept_by = Arc::clone(&metrics);
    let report = move |swept: &sockets::Swept| {
        let metrics = &swept_by;
        sockets_stay.store(swept.failure.is_some(), Ordering::Relaxed);
        swept.ended.iter().for_each(|(family, count)| metrics.ended_sockets(*family, *count));
        swept.reset.iter().for_each(|(family, count)| metrics.reset_sockets(*family, *count));
        metrics.marked_flows(swept.marked);
        if swept.failure.is_some() {
            metrics.failed_socket_sweep();
        }
    };
    tasks.spawn_optional(sockets::run(Arc::clone(&programs), config.bpffs.clone(), status.clone(), report));
    let counted = Arc::clone(&metrics);
    let report = move |moved: &Moved| counted.moved(&moved.sockets, moved.flows);
    tasks.spawn_optional(rebalance::run(Arc::clone(&programs), config.bpffs.clone(), status.clone(), report));
    tasks.spawn_optional(connections::run(Arc::clone(&programs), config.bpffs.clone(), status.clone()));
    let reported = Arc::clone(&metrics);
    let report = move |problems| reported.recent.set_standing("flow tables", problems);
    tasks.spawn_optional(grow::run(programs.pin_dir(), metrics.failed_growths.clone(), report));
    let reported = Arc::clone(&metrics);
    let report = move |problem| reported.recent.set_standing("path MTU", problem);
    tasks.spawn_optional(watches::learn_path_mtu(status.clone(), report));
    tasks.spawn_optional(forget(programs.pin_dir(), config.bpffs.clone()));
    tasks.spawn_optional(keep_events(config.bpffs.clone()));
    tasks.spawn_optional(memory::give_back(status.clone()));
    tasks.spawn_optional(announce(status));
    let result = wait_for_the_end(ends, tasks).await;
    programs.attend(false);
    // Threads may write until the process ends, and its locks hold as long.
    std::mem::forget(programs);
    result
}

/// Returns the environment variables that look like settings but are none, and logs them.
fn unknown_variables() -> Vec<String> {
    let all = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())));
    let unknown = variables::unknown(all, &[telemetry::VARIABLE]);
    for problem in &unknown {
        tracing::warn!(problem, "a setting is ignored");
    }
    unknown
}

/// Fails on a kernel whose tasks interrupt each other while they process packets.
fn require_whole_packets(config: &RunConfig) -> anyhow::Result<()> {
    if interleaves_packets() && !config.paths.allow_preempt_rt {
        bail!(
            "this kernel is PREEMPT_RT, of Linux 6.18 or newer: tasks of one CPU interrupt each other while they process packets, \
             and the packet programs share memory per CPU. Boot a kernel without PREEMPT_RT, or one that is built with \
             CONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y, and give --allow-preempt-rt"
        );
    }
    Ok(())
}

async fn start_programs(config: &RunConfig) -> anyhow::Result<Programs> {
    let root = cgroup::find(config.cgroup_root.as_deref())?;
    if !root.whole && config.cgroup_root.is_none() {
        tracing::warn!(
            cgroup = %root.path.display(),
            "this is not the root of the cgroup tree: sockets outside it are not translated. In a container, mount \
             the host's /sys/fs/cgroup and give its path with --cgroup-root"
        );
    }
    let settings = Settings {
        object: EMBEDDED,
        bpffs: config.bpffs.clone(),
        cgroup: root.path,
        capacities: config.capacities,
        packet_hook: config.packet_hook,
        tcx_order: config.paths.tcx_order,
        clsact_priority: config.paths.clsact_priority,
        xdp: config.paths.xdp,
    };
    let cgroup = settings.cgroup.clone();
    let started = spawn_blocking(move || Programs::start(&settings)).await;
    #[cfg_attr(
        not(feature = "bpf-log"),
        expect(unused_mut, reason = "reading the programs' log takes a map out")
    )]
    let mut programs = started.context("loading was interrupted")??;
    #[cfg(feature = "bpf-log")]
    follow_log(&mut programs);
    for notice in programs.notices() {
        if notice.is_warning() {
            tracing::warn!("{notice}");
        } else {
            tracing::info!("{notice}");
        }
    }
    tracing::info!(
        cgroup = %cgroup.display(),
        maps = %programs.pin_dir().display(),
        tcx = programs.uses_tcx(),
        takes_over = programs.is_current(),
        "programs loaded"
    );
    Ok(programs)
}

/// Forwards the log of the programs, if they were built with one.
#[cfg(feature = "bpf-log")]
fn follow_log(programs: &mut Programs) {
    match programs.logger() {
        Ok(mut pass_on) => drop(tokio::spawn(async move {
            loop {
                pass_on();
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        })),
        Err(error) => tracing::warn!(%error, "the programs have no log output"),
    }
}

/// Sends the state of this machine to the driver before any object; the returned follower sends later changes.
async fn read_host(
    config: &RunConfig,
    sender: &mpsc::Sender<Event>,
    sockets_stay: &Arc<AtomicBool>,
) -> anyhow::Result<Follower> {
    let sockets = if netns::may_enter() {
        EndsSockets::Agent(Arc::clone(sockets_stay))
    } else {
        EndsSockets::Helper(sockets::lock_of(&config.bpffs))
    };
    let facts = HostFacts {
        uplinks: config.network.uplinks.clone(),
        local_devices: config.network.local_devices.clone(),
        opens_loopback: true,
        masquerade: Some(Masquerade::new(config.node.masquerade_mark)),
        sockets: Some(sockets),
        // A missing cgroup is reported when the programs are loaded.
        cgroup: cgroup::find(config.cgroup_root.as_deref()).ok().map(|root| root.path),
    };
    let looked = spawn_blocking(|| Follower::start(facts));
    let looked = looked.await.context("reading devices, addresses and routes was interrupted")?;
    let follower = looked.context("cannot read devices, addresses and routes of this machine")?;
    let follower = follower.with_filters(!config.packet_hook.uses_tcx());
    sender.send(Event::Host(follower.view().clone())).await.context("the driver has ended")?;
    Ok(follower)
}

/// Returns the future that runs the HTTP servers.
fn answer(
    config: &RunConfig,
    origins: &[Origin],
    status: watch::Receiver<Status>,
    programmed: Programmed,
    metrics: Arc<Metrics>,
    notices: mpsc::Sender<Notice>,
    gate: Gate,
) -> anyhow::Result<impl Future<Output = Result<(), http::ListenError>> + use<>> {
    let addresses = http::Addresses {
        health: config.healthz_bind_address,
        metrics: config.metrics_bind_address,
        hard_fail: config.kube_proxy.bind_address_hard_fail,
    };
    let ours = serde_json::to_value(config).context("cannot show the settings at /configz")?;
    let settings = serde_json::json!({ "ballast": ours, "kubeproxy.config.k8s.io": document::of(config), "origins": origins });
    let (known, counted) = (status.clone(), Arc::clone(&metrics));
    let problems = move || {
        let mut sentences: Vec<_> = known.borrow().problems.iter().map(ToString::to_string).collect();
        sentences.extend(counted.recent.faults());
        sentences
    };
    let page = Agent::new(config.page, config.bpffs.clone(), config.node_name.clone(), problems);
    let state = http::State {
        page,
        metrics,
        status,
        programmed,
        patience: 2 * config.sync_period,
        notices,
        node_name: config.node_name.clone(),
        gate,
        config: Arc::new(settings),
    };
    Ok(http::serve(addresses, state))
}

/// Periodically compares what is programmed with the API server.
async fn audit(
    client: Client,
    driver: Ask,
    config: Arc<RunConfig>,
    status: watch::Receiver<Status>,
    audits: Arc<Audits>,
) {
    let view = match View::open(&config.bpffs) {
        Ok(view) => view,
        Err(error) => {
            tracing::error!(%error, "cannot compare what is programmed with the API server");
            return;
        }
    };
    let (period, node) = (config.api_audit_period, &config.node_name);
    crate::audit::run(Relister::new(client), view, driver, node, period, status, &audits).await;
}

/// Periodically records the faults that the programs have counted.
async fn note_faults(metrics: Arc<Metrics>, bpffs: PathBuf) {
    loop {
        let (metrics, bpffs) = (Arc::clone(&metrics), bpffs.clone());
        if let Ok(Err(error)) = spawn_blocking(move || metrics.recent.note(&bpffs)).await {
            tracing::debug!(%error, "cannot read the counters of reasons");
        }
        sleep(recent::PERIOD).await;
    }
}

/// Keeps the last refusals, drops and passes for `ballast monitor --last`.
async fn keep_events(bpffs: PathBuf) {
    const PERIOD: Duration = Duration::from_secs(1);
    let (mut history, mut is_logged) = (None, false);
    loop {
        let bpffs = bpffs.clone();
        let renew = move || -> Result<EventHistory, ViewError> {
            let mut history = history.map_or_else(|| View::open(&bpffs)?.keep_events(), Ok)?;
            history.renew();
            Ok(history)
        };
        history = match spawn_blocking(renew).await {
            Ok(Ok(history)) => Some(history),
            Ok(Err(error)) => {
                if !std::mem::replace(&mut is_logged, true) {
                    tracing::warn!(%error, "cannot keep events for `ballast monitor --last`; retrying");
                }
                None
            }
            Err(_) => return,
        };
        sleep(PERIOD).await;
    }
}

/// Removes what clients and sockets need no longer, and flows that expired long ago.
async fn forget(folder: PathBuf, bpffs: PathBuf) {
    const PERIOD: Duration = Duration::from_secs(10);
    // Every hour.
    const FLOW_PERIODS: u32 = 360;
    let (mut claimed, mut logged) = (Claimed::default(), String::new());
    for period in (0..FLOW_PERIODS).cycle() {
        sleep(PERIOD).await;
        let (folder, bpffs) = (folder.clone(), bpffs.clone());
        let before = std::mem::take(&mut claimed);
        let sweep = move || -> anyhow::Result<(usize, usize, Claimed)> {
            let (flows, claimed) = match period {
                0 => {
                    let view = View::open(&bpffs)?;
                    (view.delete_expired()?, view.claimed()?)
                }
                1 => (View::open(&bpffs)?.free_claimed(&before)?, Claimed::default()),
                _ => (0, Claimed::default()),
            };
            Ok((forget::sweep(&folder)?, flows, claimed))
        };
        match spawn_blocking(sweep).await {
            Ok(Ok((entries, flows, found))) => {
                (claimed, logged) = (found, String::new());
                if entries + flows > 0 {
                    tracing::debug!(entries, flows, "clients, sockets and expired flows forgotten");
                }
            }
            Err(_) => {}
            Ok(Err(error)) => {
                let error = error.to_string();
                if error != logged {
                    tracing::warn!(
                        error,
                        "cannot remove old entries of session affinity, sockets and flows; retrying"
                    );
                }
                logged = error;
            }
        }
    }
}

/// Logs once that the first sync is done.
async fn announce(mut status: watch::Receiver<Status>) {
    if let Ok(status) = status.wait_for(|status| status.synced).await {
        tracing::info!(
            services = status.services,
            frontends = status.frontends,
            endpoints = status.endpoints,
            "first sync done"
        );
    }
}

/// The signals that ask the process to end. As process 1 of a container, it would not get them without a handler.
pub struct Ends {
    terminate: Signal,
    interrupt: Signal,
}

impl Ends {
    /// Sets the handlers.
    pub fn listen() -> anyhow::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?,
            interrupt: signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?,
        })
    }

    /// Waits for the next signal.
    pub async fn asked(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Returns the result of a step of the start; `None` if the agent is to end.
    async fn unless<T>(&mut self, step: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = step => Some(done),
            () = self.asked() => {
                tracing::info!("exiting during the start");
                None
            }
        }
    }
}

async fn wait_for_the_end(mut ends: Ends, mut tasks: Supervisor) -> anyhow::Result<()> {
    tokio::select! {
        () = ends.asked() => {}
        error = tasks.failed() => {
            tracing::error!("{error:#}; exiting; programs and maps stay in place");
            sleep(FLUSH_TIMEOUT).await;
            return Err(error);
        }
    }
    tracing::info!("exiting; programs and maps stay in place (`ballast cleanup` removes them)");
    Ok(())
}
