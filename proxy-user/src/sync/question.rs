//! What an audit asks the driver, which alone knows what the maps should hold.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use tokio::sync::oneshot;

use crate::maps::FrontendKey;
use crate::model::{Key, Object, ServiceName};

/// What the maps should hold for each frontend: the endpoints that take new connections. `None` where an entry is known to be
/// wrong, because it could not be written: that is counted elsewhere.
pub type Expected = BTreeMap<FrontendKey, Option<BTreeSet<SocketAddr>>>;

/// The answer goes nowhere if the audit has ended meanwhile.
type Reply<T> = oneshot::Sender<T>;

/// A question, with where to send the answer.
#[derive(Debug)]
pub enum Question {
    /// Which of these Services and EndpointSlices does the driver not know, or not as they are here?
    Differing(Vec<Object>, Reply<Vec<Object>>),
    /// Which Services and EndpointSlices does it know that are not among these?
    Unlisted(BTreeSet<Key>, Reply<BTreeSet<Key>>),
    /// Takes in those of these objects (`None`: it was deleted) that still differ, and says which.
    Correct(Vec<(Key, Option<Object>)>, Reply<Vec<Key>>),
    /// What should the maps hold for so many Services behind this one? The other half of the answer is the last of them.
    Expected(Option<ServiceName>, usize, Reply<(Expected, Option<ServiceName>)>),
    /// Compares the maps with what was written to them, now and as a whole, and plans and writes all Services again.
    Repair(Reply<()>),
}
