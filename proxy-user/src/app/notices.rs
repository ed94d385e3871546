//! Kubernetes Events about Services and about this node.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use proxy_core::model::Problem;
use proxy_core::model::ServiceName;
use proxy_core::model::notice::Notice;

use crate::driver::{Status, problems_begun};
use crate::programs::{AttachedXdp, Xdp, XdpDevice};

/// Sends an event for each new problem of a Service on this node. Problems of the object itself are not sent: every
/// node would send the same event. If the queue is full, events are lost; the log has all of them.
pub async fn report_problems(mut status: watch::Receiver<Status>, sender: mpsc::Sender<Notice>) {
    let mut before: Arc<Vec<Problem>> = Arc::default();
    loop {
        let after = Arc::clone(&status.borrow_and_update().failed);
        if after != before {
            for problem in problems_begun(&before, &after) {
                if let Some(notice) = notice(problem) {
                    let _ = sender.try_send(notice);
                }
            }
            before = after;
        }
        if status.changed().await.is_err() {
            return;
        }
    }
}

/// Sends an event with the XDP mode of each uplink, each time that it changes. The event is a warning if `--xdp` names
/// a mode and an uplink has none.
pub async fn report_xdp(
    mut devices: watch::Receiver<BTreeMap<u32, XdpDevice>>,
    wanted: Xdp,
    sender: mpsc::Sender<Notice>,
) {
    loop {
        let notice = uplinks(&devices.borrow_and_update(), wanted);
        if let Some(notice) = notice {
            let _ = sender.try_send(notice);
        }
        if devices.changed().await.is_err() {
            return;
        }
    }
}

fn uplinks(devices: &BTreeMap<u32, XdpDevice>, wanted: Xdp) -> Option<Notice> {
    if wanted == Xdp::Off || devices.is_empty() {
        return None;
    }
    let one = |XdpDevice { device, mode, reason }: &XdpDevice| match mode {
        AttachedXdp::None => format!("{device}: none ({reason})"),
        AttachedXdp::Native | AttachedXdp::Generic => format!("{device}: {}", mode.label()),
    };
    let is_short = wanted != Xdp::Auto && devices.values().any(|device| device.mode == AttachedXdp::None);
    let note = devices.values().map(one).collect::<Vec<_>>().join("; ");
    Some(Notice::xdp(is_short, format!("XDP on uplinks: {note}")))
}

/// Returns the event for a problem; `None` for problems of slices: few users look at events of objects that a
/// controller creates.
fn notice(problem: &Problem) -> Option<Notice> {
    let (namespace, name) = problem.object.strip_prefix("Service ")?.split_once('/')?;
    let note = format!("{}: {}", problem.field, problem.message);
    Some(Notice::not_programmed(ServiceName::new(namespace, name), note))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(object: &str) -> Problem {
        Problem { object: object.to_owned(), field: "spec.ports".to_owned(), message: "no room".to_owned() }
    }

    #[tokio::test]
    async fn event_is_sent_when_xdp_on_an_uplink_changes() {
        let of = |name: &str, mode, reason: &str| XdpDevice {
            device: name.to_owned(),
            mode,
            reason: reason.to_owned(),
        };
        let (devices, (sender, mut events)) = (watch::Sender::new(BTreeMap::new()), mpsc::channel(8));
        let task = tokio::spawn(report_xdp(devices.subscribe(), Xdp::Native, sender));
        let mut all = BTreeMap::from([(2, of("eth0", AttachedXdp::Native, ""))]);
        devices.send_replace(all.clone());
        let notice = events.recv().await.unwrap();
        assert_eq!((notice.warning, &*notice.note), (false, "XDP on uplinks: eth0: native"));
        all.insert(3, of("eth1", AttachedXdp::None, "the driver does not support XDP"));
        devices.send_replace(all.clone());
        let notice = events.recv().await.unwrap();
        let note = "XDP on uplinks: eth0: native; eth1: none (the driver does not support XDP)";
        assert_eq!((notice.warning, &*notice.note), (true, note));
        drop(devices);
        task.await.unwrap();
        assert!(!uplinks(&all, Xdp::Auto).unwrap().warning && uplinks(&all, Xdp::Off).is_none());
    }

    #[tokio::test]
    async fn event_is_sent_when_a_problem_of_a_service_begins() {
        let status = watch::Sender::new(Status::default());
        let (sender, mut events) = mpsc::channel(8);
        let task = tokio::spawn(report_problems(status.subscribe(), sender));
        let problems = vec![problem("EndpointSlice shop/a-1"), problem("Service shop/a")];
        let of_the_object = problem("Service shop/c");
        status.send_modify(|status| {
            status.failed = Arc::new(problems.clone());
            status.problems = Arc::new([problems.clone(), vec![of_the_object]].concat());
        });
        let expected =
            Notice::not_programmed(ServiceName::new("shop", "a"), "spec.ports: no room".to_owned());
        assert_eq!(events.recv().await, Some(expected));
        // The unchanged problems cause no event; the next event is for the new problem.
        status.send_modify(|status| status.services += 1);
        tokio::task::yield_now().await;
        status.send_modify(|status| Arc::make_mut(&mut status.failed).push(problem("Service shop/b")));
        let next = events.recv().await.unwrap();
        assert_eq!(next.about, proxy_core::model::notice::Subject::Service(ServiceName::new("shop", "b")));
        drop(status);
        task.await.unwrap();
    }
}
