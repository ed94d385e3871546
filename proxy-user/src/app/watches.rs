//! Tasks that follow a value that changes, and report it: watches of the API server that fail (what is programmed stays, but
//! changes do not arrive), and the path MTU between nodes.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::driver::Status;
use crate::host::tunnel_errors::TunnelErrors;
use proxy_core::model::Watches;

/// How long a watch must fail until it is reported: a restart of the API server is no fault.
const LASTING: Duration = Duration::from_mins(1);

/// Passes the fault of the API server to `report`, and `None` when every watch works, until the sender is dropped.
pub async fn report_failing(mut watches: watch::Receiver<Watches>, report: impl Fn(Option<String>)) {
    loop {
        report(fault(&watches.borrow_and_update()));
        if let Ok(Err(_)) = timeout(LASTING, watches.changed()).await {
            return;
        }
    }
}

fn fault(watches: &Watches) -> Option<String> {
    let now = Instant::now().into_std();
    let failing = watches.iter().filter_map(|(resource, failure)| Some((*resource, failure.as_ref()?)));
    let lasting = failing.filter(|(_, failure)| now.saturating_duration_since(failure.since) >= LASTING);
    let (resources, failures): (Vec<_>, Vec<_>) = lasting.unzip();
    let first = failures.first()?;
    Some(format!(
        "API server: changes of {} do not arrive, while what is programmed stays in use: {}",
        resources.join(", "),
        first.error
    ))
}

/// Reports the value now and after each change, until its sender is dropped.
pub async fn follow<T>(mut changes: watch::Receiver<T>, report: impl Fn(&T)) {
    loop {
        report(&changes.borrow_and_update());
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Keeps the sockets for errors about encapsulated packets open while a Service has DSR.
pub async fn learn_path_mtu(mut status: watch::Receiver<Status>, report: impl Fn(Option<String>)) {
    loop {
        if status.wait_for(|status| status.needs_nodes.is_some()).await.is_err() {
            return;
        }
        // Holds the sockets until no Service has DSR.
        let errors = TunnelErrors::open();
        report(errors.as_ref().err().map(|error| {
            format!(
                "the path MTU to other nodes is not learned, and long packets of clients may be lost: cannot open a raw \
                 socket: {error}; grant CAP_NET_RAW, which the chart does with forwardingMode dsr or hybrid"
            )
        }));
        if status.wait_for(|status| status.needs_nodes.is_none()).await.is_err() {
            return;
        }
        report(None);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use proxy_core::model::WatchFailure;
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn watch_that_fails_for_a_minute_is_reported_until_it_works() {
        let watches = watch::Sender::new(Watches::from([("nodes", None), ("services", None)]));
        let reported = Arc::<Mutex<Option<String>>>::default();
        let report = Arc::clone(&reported);
        tokio::spawn(report_failing(watches.subscribe(), move |fault| *report.lock().unwrap() = fault));
        let failure = WatchFailure { since: Instant::now().into_std(), error: "refused".to_owned() };
        watches.send_modify(|watches| drop(watches.insert("services", Some(failure))));
        sleep(LASTING / 2).await;
        assert_eq!(*reported.lock().unwrap(), None);
        sleep(2 * LASTING).await;
        let fault = reported.lock().unwrap().clone().unwrap();
        assert!(fault.contains("changes of services do not") && fault.ends_with(": refused"), "{fault}");
        watches.send_modify(|watches| drop(watches.insert("services", None)));
        sleep(Duration::from_millis(1)).await;
        assert_eq!(*reported.lock().unwrap(), None);
    }
}
