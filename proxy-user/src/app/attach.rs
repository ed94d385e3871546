//! Attaches the programs to their hooks, and keeps them attached.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};

use super::watches::follow;
use crate::config::RunConfig;
use crate::driver::Status;
use crate::host::devices::LOOPBACK;
use crate::host::follow::Devices;
use crate::host::manager::{DeviceManager, DeviceState, DeviceStates, PERIOD};
use crate::host::netfilter::kube_proxy_rules::KubeProxyRules;
use crate::host::selection::Selection;
use crate::metrics::recent::{FIRST_ATTACH, SOCKET_PROGRAMS};
use crate::programs::Programs;
use proxy_core::model::plural::plural;
use proxy_core::model::settings::SocketLb;

/// How often the agent checks whether another proxy still serves the Service ports that are not programmed.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// How often the rules of another proxy are read if they cannot be read.
const ATTEMPTS: u32 = 6;

/// The pause between two attempts to attach the socket programs.
const RETRY: Duration = Duration::from_secs(5);

/// Attaches the programs: at once if an earlier agent has filled the maps, otherwise when the maps hold all listed
/// objects; then keeps the attachments, and reports by cause what is not attached, the devices without programs, and when the
/// next progress with devices is `due`. Returns an error if a task of it panics, or if the cgroup was replaced: the restart
/// attaches to the new one.
pub async fn attach(
    programs: Arc<Programs>,
    config: Arc<RunConfig>,
    devices: watch::Receiver<Devices>,
    status: watch::Receiver<Status>,
    report: impl Fn(&'static str, Vec<String>),
    bare: impl Fn(Vec<(u32, String)>),
    due: watch::Sender<Option<Instant>>,
) -> anyhow::Result<()> {
    let selection = config.devices.clone();
    let unselected = follow(devices.clone(), |devices| {
        report("unselected devices", left_out(&selection, devices, config.node.socket_lb));
    });
    if !programs.is_current() {
        if programs.has_earlier() {
            wait_for_lists(status.clone()).await;
        } else {
            report(FIRST_ATTACH, vec!["the programs are not attached yet".to_owned()]);
        }
        wait_until_filled(status, other_proxy).await;
    }
    let mut failure = attach_sockets(&programs, None, &report).await?;
    let (manager, states) = DeviceManager::new(selection.clone(), Arc::clone(&programs));
    let manager = manager.with_period(PERIOD.min(config.sync_period)).with_due(due);
    let failing = follow(manager.failure(), |failure| {
        let sentence = |error| {
            format!("cannot look after the programs on network devices, and new ones get none: {error}")
        };
        report("passes over devices", failure.iter().map(sentence).collect());
    });
    let reports = follow(states, |states| {
        report("devices", problems_of(states));
        if states.as_ref().is_some_and(serves_some) {
            report(FIRST_ATTACH, Vec::new());
        }
        let without = states.iter().flatten().filter(|(_, state)| state.is_bare);
        bare(without.map(|(ifindex, state)| (*ifindex, state.name.clone())).collect());
    });
    // Devices do not wait for the sockets.
    let sockets = async {
        while failure.is_some() {
            sleep(RETRY).await;
            failure = attach_sockets(&programs, failure.as_deref(), &report).await?;
        }
        keep(Arc::clone(&programs), config.sync_period, &report).await
    };
    let devices = async {
        tokio::join!(manager.run(devices), reports, failing, unselected);
        anyhow::Ok(())
    };
    tokio::try_join!(devices, sockets).map(drop)
}

/// Whether a device has its programs, or there is none that could have them. On the loopback device, they serve no client.
fn serves_some(states: &BTreeMap<u32, DeviceState>) -> bool {
    let mut others = states.iter().filter(|(ifindex, _)| **ifindex != LOOPBACK).map(|(_, state)| state);
    others.clone().next().is_none() || others.any(|state| !state.is_bare)
}

/// Attaches the socket programs; returns the problem if not all are attached, and logs one that differs from that of `before`.
async fn attach_sockets(
    programs: &Arc<Programs>,
    before: Option<&str>,
    report: &impl Fn(&'static str, Vec<String>),
) -> anyhow::Result<Option<String>> {
    let attaching = Arc::clone(programs);
    let attach = move || attaching.require_cgroup().map(|()| attaching.attach_sockets());
    let attached = spawn_blocking(attach).await??;
    let failure = attached.as_ref().err().map(|error| format!("cannot attach the socket programs: {error}"));
    match &attached {
        Ok(outcomes) => {
            for (hook, outcome) in outcomes {
                tracing::debug!(hook, ?outcome, "socket program attached");
            }
            tracing::info!("socket programs attached");
        }
        Err(error) if failure.as_deref() != before => {
            tracing::error!(%error, "cannot attach the socket programs; retrying every 5 s");
        }
        Err(_) => {}
    }
    report(SOCKET_PROGRAMS, failure.iter().cloned().collect());
    Ok(failure)
}

/// Maximum number of devices that `ballast status` lists with their problems.
const LISTED: usize = 5;

fn problems_of(states: &DeviceStates) -> Vec<String> {
    let all: Vec<_> = states.iter().flatten().filter_map(|(_, state)| state.problem.as_ref()).collect();
    let listed = all.iter().take(LISTED).map(|problem| format!("a device has no packet programs: {problem}"));
    let rest = all.len().saturating_sub(LISTED);
    let more = (rest > 0)
        .then(|| format!("{} without packet programs, named in the log", plural(rest, "more device")));
    let effect = (!all.is_empty()).then(|| {
        "while a device has no packet programs, connected UDP sockets of pods are translated by connect(2), and keep an endpoint \
         that is removed unless `ballast end-udp-sockets` runs"
            .to_owned()
    });
    listed.chain(more).chain(effect).collect()
}

/// Returns the problem that the operator's selection of devices lacks those of pods.
fn left_out(selection: &Selection, devices: &Devices, socket_lb: SocketLb) -> Vec<String> {
    let names: Vec<_> = selection.left_out(devices).map(|device| &*device.name).collect();
    let Some(first) = names.first() else { return Vec::new() };
    let effect = match socket_lb {
        SocketLb::All => {
            "their packets are not translated, only calls of sockets are: pods with the proxy of a service mesh (`--mesh-ports`) reach \
             no Service by other packets than the proxy's, and connected UDP sockets keep an endpoint that is removed"
        }
        SocketLb::HostOnly | SocketLb::Off => {
            "neither their packets nor their sockets are translated: they reach no Service"
        }
    };
    vec![format!(
        "`--devices` does not select {} of pods or containers, such as {first}: {effect}. Without `--devices`, all devices get \
         programs",
        plural(names.len(), "device")
    )]
}

/// Whether kube-proxy's rules serve this node; if they cannot be read, after some more attempts. An agent without the privilege
/// to read them cannot attach programs either, which is reported elsewhere.
async fn other_proxy() -> bool {
    for _ in 0..ATTEMPTS {
        match spawn_blocking(KubeProxyRules::read).await {
            Ok(Ok(found)) if found.has_rules() || !found.is_incomplete => return found.has_rules(),
            _ => sleep(LOOK_AGAIN).await,
        }
    }
    tracing::warn!("cannot read the rules of netfilter: kube-proxy may serve this node, too");
    false
}

/// How long programs of an earlier agent with other maps stay in place while nothing was listed.
const LISTS_PATIENCE: Duration = Duration::from_mins(2);

/// Waits until everything was listed: programs of an earlier agent serve all Services, and the maps may have the static ones only. Not
/// for ever, since the API server may be reached through a static Service whose endpoints have changed.
async fn wait_for_lists(mut status: watch::Receiver<Status>) {
    if timeout(LISTS_PATIENCE, status.wait_for(|status| status.synced)).await.is_err() {
        tracing::warn!("no API server has listed the Services: programs of an earlier agent are replaced");
    }
}

/// Waits until the maps hold everything that was listed, or the static Services, through which the API server itself
/// may be reached: before the lists, programs refuse nothing. If no other proxy serves the node, the first sync
/// suffices, since the Services that fit are better than none. Beside another proxy, the programs would refuse clients
/// of Services that it still serves.
async fn wait_until_filled<F>(mut status: watch::Receiver<Status>, other_proxy: impl Fn() -> F)
where
    F: Future<Output = bool>,
{
    let mut is_logged = false;
    while status.wait_for(|status| status.synced || status.statics_synced).await.is_ok() {
        // One guard only: a second one would wait for the driver, which waits until the first one is dropped.
        let has_enough = {
            let status = status.borrow();
            !status.synced || status.complete
        };
        if has_enough || !other_proxy().await {
            return;
        }
        if !std::mem::replace(&mut is_logged, true) {
            tracing::warn!(
                failing = status.borrow().failing,
                "some Service ports are not programmed, and kube-proxy's rules serve this node: the programs are attached \
                 when all ports are programmed or the rules are removed"
            );
        }
        let filled = timeout(LOOK_AGAIN, status.wait_for(|status| status.complete)).await;
        if let Ok(Err(_)) = filled {
            break;
        }
    }
    // The driver has ended, so the agent ends too.
    std::future::pending::<()>().await;
}

/// Restores every `period` what was detached or removed externally, until the cgroup is replaced.
async fn keep(
    programs: Arc<Programs>,
    period: Duration,
    report: &impl Fn(&'static str, Vec<String>),
) -> anyhow::Result<()> {
    let mut failures = [None, None];
    loop {
        sleep(period).await;
        let programs = Arc::clone(&programs);
        let repaired =
            spawn_blocking(move || programs.require_cgroup().map(|()| programs.repair())).await??;
        for repair in repaired.done {
            tracing::warn!(what = %repair, "detached or removed externally; restored");
        }
        let results = [(SOCKET_PROGRAMS, repaired.sockets), ("repairs", repaired.pins)];
        for ((cause, result), failure) in results.into_iter().zip(&mut failures) {
            let error = result.err().map(|error| error.to_string());
            if error == *failure {
                continue;
            }
            if let Some(error) = &error {
                tracing::error!(error, "cannot restore what was detached or removed externally; retrying");
            }
            let problem =
                error.iter().map(|error| format!("cannot restore what was detached or removed: {error}"));
            report(cause, problem.collect());
            *failure = error;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_of_many_devices_without_programs_are_named() {
        let state = |number: u32| {
            let problem = (number != 3).then(|| format!("cannot attach tc_ingress to device veth{number}"));
            (number, DeviceState { name: format!("veth{number}"), is_bare: problem.is_some(), problem })
        };
        let problems = problems_of(&Some((1..=9).map(state).collect()));
        assert_eq!(problems.len(), 7);
        assert!(
            problems[0].ends_with("device veth1") && problems[5].starts_with("3 more devices"),
            "{problems:?}"
        );
        assert!(problems_of(&None).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn earlier_programs_stay_until_services_are_listed() {
        let (sender, status) = watch::channel(Status { statics_synced: true, ..Status::default() });
        let waits = |status| tokio::spawn(wait_for_lists(status));
        let (lists, never) = (waits(status), waits(watch::Sender::new(Status::default()).subscribe()));
        sleep(Duration::from_mins(1)).await;
        assert!(!lists.is_finished());
        sender.send_modify(|status| status.synced = true);
        sleep(Duration::from_millis(1)).await;
        assert!(lists.is_finished());
        sleep(LISTS_PATIENCE).await;
        assert!(never.is_finished());
    }

    #[tokio::test(start_paused = true)]
    async fn beside_another_proxy_programs_wait_until_everything_is_programmed() {
        let (sender, status) = watch::channel(Status::default());
        let waits = |status, other| tokio::spawn(wait_until_filled(status, move || async move { other }));
        let (alone, beside) = (waits(status.clone(), false), waits(status, true));
        sleep(Duration::from_mins(1)).await;
        assert!(!alone.is_finished() && !beside.is_finished(), "nothing is in the maps");
        sender.send_modify(|status| status.synced = true);
        sleep(Duration::from_mins(1)).await;
        assert!(alone.is_finished() && !beside.is_finished(), "some do not fit");
        sender.send_modify(|status| status.complete = true);
        sleep(Duration::from_millis(1)).await;
        assert!(beside.is_finished());
    }
}
