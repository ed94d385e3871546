//! Attaches the programs to their hooks, and keeps them attached.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use super::follow::follow;
use crate::config::RunConfig;
use crate::driver::Status;
use crate::host::follow::Devices;
use crate::host::manager::{DeviceManager, DeviceStates, PERIOD};
use crate::host::netfilter::kube_proxy_rules::KubeProxyRules;
use crate::programs::Programs;

/// How often the agent checks whether another proxy still serves the Service ports that are not programmed.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Attaches the programs: at once if an earlier agent has filled the maps, otherwise when the maps hold all listed
/// objects; then keeps the attachments, and reports the devices without programs. Returns an error if a task of it panics.
pub async fn attach(
    programs: Arc<Programs>,
    config: Arc<RunConfig>,
    devices: watch::Receiver<Devices>,
    status: watch::Receiver<Status>,
    report: impl Fn(Vec<String>),
) -> anyhow::Result<()> {
    let selection = config.devices.clone();
    if !programs.is_current() {
        wait_until_filled(status, other_proxy).await;
    }
    loop {
        let attaching = Arc::clone(&programs);
        match spawn_blocking(move || attaching.attach_sockets()).await? {
            Ok(outcomes) => {
                for (hook, outcome) in outcomes {
                    tracing::debug!(hook, ?outcome, "socket program attached");
                }
                tracing::info!("socket programs attached");
                break;
            }
            Err(error) => {
                tracing::error!(%error, "cannot attach the socket programs; retrying in 5 s");
            }
        }
        sleep(Duration::from_secs(5)).await;
    }
    let (manager, states) = DeviceManager::new(selection, Arc::clone(&programs));
    let manager = manager.with_period(PERIOD.min(config.sync_period));
    let reports = follow(states, |states| report(problems_of(states)));
    tokio::join!(manager.run(devices), reports, keep(programs, config.sync_period));
    Ok(())
}

/// Maximum number of devices that `ballast status` lists with their problems.
const LISTED: usize = 5;

fn problems_of(states: &DeviceStates) -> Vec<String> {
    let all: Vec<_> = states.iter().flatten().filter_map(|(_, state)| state.problem.as_ref()).collect();
    let told = all.iter().take(LISTED).map(|problem| format!("a device has no packet programs: {problem}"));
    let rest = all.len().saturating_sub(LISTED);
    let more = (rest > 0).then(|| format!("{rest} more devices have no packet programs; the log names them"));
    told.chain(more).collect()
}

/// Whether kube-proxy's rules serve this node. An agent without the privilege to read them cannot attach programs
/// either, which is reported elsewhere.
async fn other_proxy() -> bool {
    spawn_blocking(KubeProxyRules::read).await.is_ok_and(|found| found.is_ok_and(|found| found.has_rules()))
}

/// Waits until the maps hold everything that was listed, or the static Services, through which the API server itself
/// may be reached: before the lists, programs refuse nothing. If no other proxy serves the node, the first sync
/// suffices, since the Services that fit are better than none. Beside another proxy, the programs would refuse clients
/// of Services that it still serves.
async fn wait_until_filled<F>(mut status: watch::Receiver<Status>, other_proxy: impl Fn() -> F)
where
    F: Future<Output = bool>,
{
    let mut is_told = false;
    while status.wait_for(|status| status.synced || status.statics_synced).await.is_ok() {
        // One guard only: a second one would wait for the driver, which waits until the first one is dropped.
        let has_enough = {
            let status = status.borrow();
            !status.synced || status.complete
        };
        if has_enough || !other_proxy().await {
            return;
        }
        if !std::mem::replace(&mut is_told, true) {
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

/// Restores every `period` what was detached or removed externally.
async fn keep(programs: Arc<Programs>, period: Duration) {
    let mut failure: Option<String> = None;
    loop {
        sleep(period).await;
        let programs = Arc::clone(&programs);
        let Ok(result) = spawn_blocking(move || programs.repair()).await else { return };
        let error = match result {
            Ok(repairs) => {
                for repair in repairs {
                    tracing::warn!(what = %repair, "detached or removed externally; restored");
                }
                None
            }
            Err(error) => Some(error.to_string()),
        };
        if let Some(error) = error.as_ref().filter(|error| failure.as_ref() != Some(error)) {
            tracing::error!(error, "cannot restore what was detached or removed externally; retrying");
        }
        failure = error;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::manager::DeviceState;

    #[test]
    fn some_of_many_devices_without_programs_are_named() {
        let state = |number: u32| {
            let problem = (number != 3).then(|| format!("cannot attach tc_ingress to device veth{number}"));
            (number, DeviceState { name: format!("veth{number}"), problem })
        };
        let told = problems_of(&Some((1..=9).map(state).collect()));
        assert_eq!(told.len(), 6);
        assert!(told[0].ends_with("device veth1") && told[5].starts_with("3 more devices"), "{told:?}");
        assert!(problems_of(&None).is_empty());
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
