//! `cargo xtask test e2e`: runs Kubernetes' own end-to-end tests of Services, on clusters made for them.

mod report;

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use fs_err::{self as fs, File};

use crate::cluster::{self, Cni, Given, Proxy, Up, Which, Workdir};
use crate::workspace::Workspace;
use crate::{exec, gotools, host, log, signal};
use report::Results;

/// Selects the specs of the suite that are about Services.
const FOCUS: &str = r"\[sig-network\] (Services|EndpointSlice|EndpointSliceMirroring|Conntrack|Traffic Distribution|LocalhostNodePorts) ";
/// Excludes specs that take very long, or break the cluster for other specs.
const SKIP: &str = r"\[sig-windows\]|\[Slow\]|\[Disruptive\]|\[Flaky\]|\[Alpha\]";
/// Of the specs that need a feature of the cluster (a cloud, for example), only those of these features run.
const FEATURES: &str = "Feature: isSubsetOf {LocalhostNodePorts, NetworkPolicy}";
/// One spec of each kind, for a run that takes minutes.
const SMOKE: [&str; 14] = [
    "should serve a basic endpoint from pods",
    "should serve multiport endpoints from pods",
    "should allow pods to hairpin back to themselves",
    "should preserve source pod IP for traffic thru service cluster IP",
    "should be able to create a functioning NodePort service",
    "via ExternalIP when the external IP is not assigned to a node",
    "should have session affinity work for service with type clusterIP",
    "should implement service.kubernetes.io/headless",
    "should be rejected when no endpoints exist",
    "should respect internalTrafficPolicy=Local Pod to Pod",
    "should support externalTrafficPolicy=Local for type=NodePort",
    "should serve endpoints on same port and different protocols",
    "should support a Service with multiple endpoint IPs specified in multiple EndpointSlices",
    "should be able to preserve UDP traffic when server pod cycles for a ClusterIP service$",
];
/// Time limit of a run.
const LIMIT: Duration = Duration::from_hours(1);
/// Interval of the progress messages of a long run.
const HEARTBEAT: Duration = Duration::from_mins(1);

/// Run Kubernetes' end-to-end tests of Services with Ballast, and with kube-proxy for comparison (needs root).
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The proxy for Services; can be given several times: each has a run, and the results are compared
    #[arg(long = "proxy", value_enum, default_values_t = [Proxy::BallastHost])]
    pub proxies: Vec<Proxy>,
    /// The CNI plugin of the cluster
    #[arg(long, value_enum, default_value_t = Cni::Bridge, conflicts_with = "on")]
    pub cni: Cni,
    /// Run only a few specs, which take minutes, on three nodes
    #[arg(long)]
    pub smoke: bool,
    /// Run other specs: a regular expression for their names
    #[arg(long, value_name = "RE", conflicts_with = "smoke")]
    pub focus: Option<String>,
    /// Number of specs that run in parallel
    #[arg(long, default_value_t = 8)]
    pub procs: u8,
    /// Number of nodes; the specs about zones need six
    #[arg(long)]
    pub nodes: Option<u8>,
    /// Which Ballast.
    #[command(flatten)]
    pub given: Given,
    /// Use the running cluster with this name, and change its proxy if needed
    #[arg(long, value_name = "NAME")]
    pub on: Option<String>,
    /// Keep the last cluster running at the end
    #[arg(long, conflicts_with = "on")]
    pub keep: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    exec::require_root("create the namespaces of the nodes", "test e2e")?;
    signal::catch();
    let workspace = Workspace::find()?;
    let programs = gotools::build(&workspace, &gotools::SUITE)?;
    let mut runs = Vec::new();
    let done = args.proxies.iter().enumerate().try_for_each(|(number, &proxy)| -> Result<()> {
        let is_last = number + 1 == args.proxies.len();
        runs.push((proxy.to_string(), one(args, &workspace, &programs, proxy, is_last)?));
        Ok(())
    });
    let mut out = std::io::stdout().lock();
    let mut put = |text: &str| writeln!(out, "{text}").context("cannot write the results");
    if !runs.is_empty() {
        put(&report::table(&runs))?;
    }
    done?;
    let mut all = (0, 0);
    for (proxy, results) in &runs {
        let (passed, failed) = report::count(results);
        if runs.len() > 1 {
            put(&format!("{proxy}: {passed} passed, {failed} failed"))?;
        }
        all = (all.0 + passed, all.1 + failed);
    }
    put(&format!("{} passed, {} failed", all.0, all.1))?;
    match all {
        (0, 0) => bail!("no spec was chosen"),
        (_, 0) => Ok(()),
        (_, failed) => bail!("{failed} specs failed"),
    }
}

/// Runs the suite with one proxy, on a new cluster unless `--on` names one.
fn one(
    args: &Args,
    workspace: &Workspace,
    programs: &[PathBuf],
    proxy: Proxy,
    is_last: bool,
) -> Result<Results> {
    let logs = Logs::new(&workspace.target().join("e2e"), &proxy.to_string())?;
    let results = run_with(args, programs, proxy, is_last, &logs.folder);
    let passed = results.as_ref().is_ok_and(|results| report::count(results).1 == 0);
    log::line(format_args!("    logs: {}", logs.keep(passed)?.display()));
    results
}

/// The folder of a run's logs.
struct Logs {
    folder: PathBuf,
}

impl Logs {
    /// Makes an empty folder; removes logs of an earlier run, except a failed one, whose folder [`Logs::keep`] has renamed.
    fn new(parent: &Path, proxy: &str) -> Result<Self> {
        let folder = parent.join(proxy);
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder)?;
        Ok(Self { folder })
    }

    /// Returns the final path of the logs: the folder of a failed run is renamed, so that the next run does not remove it.
    fn keep(self, passed: bool) -> Result<PathBuf> {
        if passed {
            return Ok(self.folder);
        }
        let name = |number: u32| {
            let mut path = self.folder.clone().into_os_string();
            path.push(format!("-failed-{number}"));
            PathBuf::from(path)
        };
        let free = (1..1000).map(name).find(|path| !path.exists()).context("too many runs have failed")?;
        fs::rename(&self.folder, &free)?;
        Ok(free)
    }
}

fn run_with(args: &Args, programs: &[PathBuf], proxy: Proxy, is_last: bool, logs: &Path) -> Result<Results> {
    if let Some(name) = &args.on {
        let workdir = cluster::there(&Which { name: name.clone() })?;
        cluster::change_proxy(&workdir, proxy, &args.given)?;
        return suite(args, &workdir, programs, logs);
    }
    let name = format!("e2e{}", std::process::id());
    let nodes = args.nodes.unwrap_or(if args.smoke { 3 } else { 6 });
    let workdir = Workdir::of(&name)?;
    let results = cluster::up(&Up {
        nodes,
        proxy,
        cni: args.cni,
        settings: Vec::new(),
        given: args.given.clone(),
        which: Which { name },
    })
    .and_then(|workdir| suite(args, &workdir, programs, logs));
    if workdir.exists() {
        keep_logs(&workdir, logs);
    }
    if args.keep && is_last && results.is_ok() {
        log::line(format_args!("the cluster `{}` stays", workdir.name()));
    } else {
        cluster::down(&workdir)?;
    }
    results
}

/// Runs the suite on a cluster.
fn suite(args: &Args, workdir: &Workdir, programs: &[PathBuf], logs: &Path) -> Result<Results> {
    let [tests, ginkgo] = programs else { bail!("the suite was not built") };
    let file = logs.join("suite.log");
    let log = File::create(&file)?.into_file();
    let both = log.try_clone().context("cannot open a log")?;
    // ginkgo recognizes a suite by the name of its file.
    let named = workdir.programs().join("e2e.test");
    if !named.exists() {
        fs_err::os::unix::fs::symlink(tests, &named)?;
    }
    let focus = match &args.focus {
        Some(focus) => focus.clone(),
        None if args.smoke => SMOKE.join("|"),
        None => FOCUS.to_owned(),
    };
    let mut command = Command::new(workdir.control().script());
    command.arg(ginkgo).args(["--no-color", "--json-report=report.json"]);
    command.arg(format!("--procs={}", args.procs)).arg(format!("--output-dir={}", logs.display()));
    command.arg(format!("--focus={focus}")).arg(format!("--skip={SKIP}"));
    command.arg(format!("--label-filter={FEATURES}")).arg(named).arg("--");
    command.args(["--provider=skeleton", "--allowed-not-ready-nodes=0"]);
    command.arg(format!("--num-nodes={}", workdir.nodes().len()));
    command.arg(format!("--kubeconfig={}", workdir.kubeconfig("admin").display()));
    log::step(format_args!("run the suite, {} specs at a time; its log is {}", args.procs, file.display()));
    let start = Instant::now();
    let child = command.stdin(Stdio::null()).stdout(log).stderr(both).process_group(0).spawn();
    let mut child = child.context("cannot start the suite")?;
    watch(&mut child, start)?;
    log::line(format_args!("    the suite took {}", log::seconds(start.elapsed())));
    let report = logs.join("report.json");
    let text = fs::read_to_string(&report)
        .with_context(|| format!("the suite made no report; its log is {}", file.display()))?;
    report::read(&text)
}

/// Waits until the suite ends; ignores its exit status, which says no more than the report.
fn watch(child: &mut Child, start: Instant) -> Result<()> {
    let mut last_report = start;
    loop {
        if child.try_wait().context("cannot wait for the suite")?.is_some() {
            return Ok(());
        }
        let stop = signal::check().err().or_else(|| {
            (start.elapsed() > LIMIT)
                .then(|| anyhow::anyhow!("the suite took longer than {}", log::seconds(LIMIT)))
        });
        if let Some(why) = stop {
            host::kill(-child.id().cast_signed(), libc::SIGKILL);
            child.wait().context("cannot wait for the suite")?;
            return Err(why);
        }
        if last_report.elapsed() > HEARTBEAT {
            log::line(format_args!("    the suite still runs, {} so far", log::seconds(start.elapsed())));
            last_report = Instant::now();
        }
        sleep(Duration::from_millis(200));
    }
}

/// Copies the logs of the cluster's programs and of the agents in pods, to find the cause of a failure later.
fn keep_logs(workdir: &Workdir, logs: &Path) {
    let programs = host::names_in(&workdir.logs()).into_iter().map(|name| (workdir.logs().join(&name), name));
    for (file, name) in programs.chain(cluster::agent_logs(workdir)) {
        if let Err(error) = fs::copy(file, logs.join(&name)) {
            log::line(format_args!("warning: cannot keep {name}: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_a_failed_run_stay_when_the_next_one_begins() {
        let dir = tempfile::tempdir().unwrap();
        let run = |text: &str, passed: bool| {
            let logs = Logs::new(dir.path(), "ballast").unwrap();
            assert!(fs::read_dir(&logs.folder).unwrap().next().is_none(), "what another run left");
            fs::write(logs.folder.join("suite.log"), text).unwrap();
            logs.keep(passed).unwrap()
        };
        let (first, second, third) = (run("first", false), run("second", false), run("third", true));
        let read = |folder: &Path| fs::read_to_string(folder.join("suite.log")).unwrap();
        assert_eq!([&first, &second, &third].map(|folder| read(folder)), ["first", "second", "third"]);
        assert_eq!(third, dir.path().join("ballast"));
        assert_eq!(run("fourth", true), third);
        assert_eq!(read(&first), "first");
    }
}
