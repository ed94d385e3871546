//! Frontends that are new.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use proxy_common::service::{KIND_CLUSTER_IP, KIND_EXTERNAL_IP, SERVICE_RECENT};
use proxy_core::model::{Event, Key, Object, Service, ServiceName};

use super::{MOMENT, Running, Shared, pass, service, slice, vip};

const HOUR: Duration = Duration::from_hours(1);

fn with(external: &[IpAddr]) -> Service {
    Service { external_ips: external.to_vec(), ..service("a", 1) }
}

impl Running {
    /// Returns whether each frontend is marked.
    fn recent(&self) -> BTreeMap<IpAddr, bool> {
        let store = self.tables.0.lock().unwrap();
        let frontends = store.contents().services.iter();
        let frontends =
            frontends.filter(|(_, entry)| [KIND_CLUSTER_IP, KIND_EXTERNAL_IP].contains(&entry.kind));
        frontends.map(|(key, entry)| (key.addr, entry.flags & SERVICE_RECENT != 0)).collect()
    }

    async fn put(&self, external: &[IpAddr]) {
        self.send(Event::Apply(Object::Service(with(external)))).await;
        pass(Duration::from_secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn external_frontend_is_recent_for_a_day() {
    let driver = Running::new();
    driver.list(vec![with(&[vip(11)])], vec![slice("a", 1..3)]).await;
    pass(MOMENT).await;
    assert_eq!(driver.recent(), [(vip(1), false), (vip(11), true)].into());
    pass(23 * HOUR).await;
    driver.put(&[vip(11), vip(12)]).await;
    assert_eq!(driver.recent(), [(vip(1), false), (vip(11), true), (vip(12), true)].into());
    pass(2 * HOUR).await;
    let expected = [(vip(1), false), (vip(11), false), (vip(12), true)];
    assert_eq!(driver.recent(), expected.into(), "each has its own day");
    pass(23 * HOUR).await;
    assert!(driver.recent().values().all(|is_recent| !is_recent));
}

#[tokio::test(start_paused = true)]
async fn restart_keeps_recent_frontends_and_marks_no_others() {
    let tables = Shared::new();
    for (hours, recent) in [(23, true), (25, true), (0, false)] {
        let driver = Running::start(tables.clone());
        driver.list(vec![with(&[vip(11)])], vec![slice("a", 1..3)]).await;
        pass(MOMENT).await;
        assert_eq!(driver.recent()[&vip(11)], recent, "{hours}");
        pass(hours * HOUR).await;
        driver.task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn frontend_that_comes_again_is_recent() {
    let driver = Running::new();
    driver.list(vec![with(&[vip(11)])], vec![slice("a", 1..3)]).await;
    pass(25 * HOUR).await;
    driver.put(&[]).await;
    driver.put(&[vip(11)]).await;
    assert!(driver.recent()[&vip(11)]);
    driver.send(Event::Delete(Key::Service(ServiceName::new("default", "a")))).await;
    pass(Duration::from_secs(1)).await;
    assert_eq!(driver.recent(), BTreeMap::new());
}
