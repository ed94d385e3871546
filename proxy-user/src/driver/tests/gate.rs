//! Pods that wait until this node has programmed them.

use std::net::IpAddr;

use tokio::sync::{mpsc, oneshot};

use proxy_core::model::{Event, Object, ServiceName};

use super::{DriverSettings, MOMENT, Running, Shared, pass, service, slice};
use crate::driver::{PodState, Question};

#[tokio::test(start_paused = true)]
async fn pod_is_known_before_it_is_ready_and_selected_until_it_terminates() {
    let (ask, questions) = mpsc::channel(1);
    let driver = Running::with_questions(Shared::new(), DriverSettings::default(), questions);
    let state = async |of: &str, addresses: &[IpAddr]| {
        let (reply, answer) = oneshot::channel();
        ask.send(Question::Pod(ServiceName::new("default", of), addresses.to_vec(), reply)).await.unwrap();
        let PodState { is_known, is_selected } = answer.await.unwrap();
        (is_known, is_selected)
    };
    let mut endpoints = slice("a", 1..3);
    let (first, other) = (endpoints.endpoints[0].address, "fd00::1".parse().unwrap());
    assert_eq!(state("a", &[first]).await, (false, true), "nothing is listed");
    driver.list(vec![service("a", 1)], vec![slice("a", 2..3)]).await;
    pass(MOMENT).await;
    assert_eq!(state("a", &[first]).await, (false, false));
    let change = async |endpoints: &proxy_core::model::EndpointSlice| {
        driver.send(Event::Apply(Object::Slice(endpoints.clone()))).await;
        pass(MOMENT).await;
    };
    (endpoints.endpoints[0].ready, endpoints.endpoints[0].serving) = (false, false);
    change(&endpoints).await;
    assert_eq!(state("a", &[first]).await, (true, false), "it is not ready");
    assert_eq!(state("a", &[first, other]).await, (true, false), "the Service has one family");
    assert_eq!(state("a", &[other]).await, (false, false));
    assert_eq!(state("b", &[first]).await, (false, false));
    (endpoints.endpoints[0].ready, endpoints.endpoints[0].serving) = (true, true);
    change(&endpoints).await;
    assert_eq!(state("a", &[first]).await, (true, true));
    (endpoints.endpoints[0].ready, endpoints.endpoints[0].terminating) = (false, true);
    change(&endpoints).await;
    assert_eq!(state("a", &[first]).await, (true, false), "the other endpoint is ready");
    endpoints.endpoints.truncate(1);
    change(&endpoints).await;
    // The next sync waits for the pause after the last one.
    pass(std::time::Duration::from_secs(1)).await;
    assert_eq!(state("a", &[first]).await, (true, true), "it is the last one, and serves");
}
