//! Questions of an audit, and of pods, to the driver, which alone knows the desired content of the maps.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use tokio::sync::{mpsc, oneshot};

use super::gate::PodState;
use proxy_core::model::{Key, Object, ServiceName};
use proxy_core::sync::Expected;

/// The sender of the answer. The answer is lost if the one that asked has ended.
pub type Reply<T> = oneshot::Sender<T>;

/// A handle to send questions to the driver.
#[derive(Clone, Debug)]
pub struct Ask(mpsc::Sender<Question>);

impl Ask {
    /// Creates a handle for the driver that receives the questions of `sender`.
    pub const fn new(sender: mpsc::Sender<Question>) -> Self {
        Self(sender)
    }

    /// Returns the answer; `None` if the driver has ended.
    pub async fn ask<T>(&self, question: impl FnOnce(Reply<T>) -> Question) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.0.send(question(reply)).await.ok()?;
        answer.await.ok()
    }
}

/// A question, with the sender of its answer.
#[derive(Debug)]
pub enum Question {
    /// Which of these Services and EndpointSlices does the driver not know, or know with other content?
    Differing(Vec<Object>, Reply<Vec<Object>>),
    /// Which Services and EndpointSlices does the driver know that are not among these?
    Unlisted(BTreeSet<Key>, Reply<BTreeSet<Key>>),
    /// Takes those of these objects (`None`: deleted) that still differ from the driver's state; the answer is their keys.
    Correct(Vec<(Key, Option<Object>)>, Reply<Vec<Key>>),
    /// What should the maps hold for the next Services after this one, up to this number? The answer also has the name of
    /// the last Service.
    Expected(Option<ServiceName>, usize, Reply<(Expected, Option<ServiceName>)>),
    /// What is the state of the pod with these addresses as an endpoint of this Service?
    Pod(ServiceName, Vec<IpAddr>, Reply<PodState>),
    /// Which endpoints does this Service have?
    Endpoints(ServiceName, Reply<Vec<SocketAddr>>),
    /// Compares all entries of the maps with the mirror at once, repairs them, plans all Services again, and writes them.
    Repair(Reply<()>),
}
