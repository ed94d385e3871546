//! Keeps the packet programs on the devices that are chosen, while devices come, go and change.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::timeout;

use super::devices::Device;
use super::follow::Devices;
use super::selection::Selection;

/// The pass that needs no new list; it also retries what failed.
pub const PERIOD: Duration = Duration::from_secs(10);
/// The first retry of what failed.
const RETRY: Duration = Duration::from_secs(1);

/// What a device needs from the programs. Calls block, and come from one task at a time.
pub trait DeviceHooks: Send + Sync + 'static {
    /// What can go wrong.
    type Error: Display + Send;

    /// Puts the programs on a device, or replaces those of an earlier agent there.
    fn attach(&self, device: &Device) -> Result<(), Self::Error>;

    /// Takes them off a device that is not chosen any more, or forgets one that is gone.
    fn detach(&self, ifindex: u32) -> Result<(), Self::Error>;

    /// Programs that were on a device had gone, and are there again.
    fn attached_again(&self) {}

    /// A pass over these devices is done: all that are chosen have what they need, or cannot have it.
    fn settled(&self, _devices: &[Device]) {}

    /// Devices that have something of ours, by this agent or an earlier one, and whether nothing is missing.
    fn attached(&self) -> BTreeMap<u32, bool>;
}

/// One chosen device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceState {
    /// Its name.
    pub name: String,
    /// Why it has no programs; `None` when it has.
    pub problem: Option<String>,
}

/// The chosen devices by index; `None` before the first pass.
pub type DeviceStates = Option<BTreeMap<u32, DeviceState>>;

/// Keeps devices right until it is dropped.
pub struct DeviceManager<H> {
    selection: Selection,
    hooks: Arc<H>,
    states: watch::Sender<DeviceStates>,
    period: Duration,
}

impl<H: DeviceHooks> DeviceManager<H> {
    /// A manager, and where to read how it is doing.
    pub fn new(selection: Selection, hooks: Arc<H>) -> (Self, watch::Receiver<DeviceStates>) {
        let (states, receiver) = watch::channel(None);
        (Self { selection, hooks, states, period: PERIOD }, receiver)
    }

    /// Makes a pass so often, even when nothing has changed; every 10 s unless told otherwise.
    #[must_use]
    pub fn with_period(self, period: Duration) -> Self {
        Self { period, ..self }
    }

    /// Runs until `devices` has no sender any more: a pass at the start, one for each list of devices, and one now and then.
    pub async fn run(self, mut devices: watch::Receiver<Devices>) {
        loop {
            let list = Arc::clone(&devices.borrow_and_update());
            let period = match self.pass(list).await {
                Ok(false) => self.period,
                Ok(true) => RETRY,
                Err(error) => {
                    tracing::warn!(%error, "attaching to network devices was interrupted; retrying");
                    RETRY
                }
            };
            if let Ok(Err(_)) = timeout(period, devices.changed()).await {
                return;
            }
        }
    }

    /// Puts right what differs on these devices; whether something failed.
    async fn pass(&self, devices: Devices) -> Result<bool, JoinError> {
        let (selection, hooks) = (self.selection.clone(), Arc::clone(&self.hooks));
        let before = self.states.borrow().clone();
        let work = move || {
            let states = reconcile(&selection, &*hooks, before.as_ref(), &devices);
            hooks.settled(&devices);
            states
        };
        let after = spawn_blocking(work).await?;
        let failed = after.values().any(|state| state.problem.is_some());
        self.states.send_if_modified(|states| {
            let modified = states.as_ref() != Some(&after);
            *states = Some(after);
            modified
        });
        Ok(failed)
    }
}

/// One pass over all devices; the result is the new state of the chosen ones.
fn reconcile<H: DeviceHooks>(
    selection: &Selection,
    hooks: &H,
    before: Option<&BTreeMap<u32, DeviceState>>,
    devices: &[Device],
) -> BTreeMap<u32, DeviceState> {
    let attached = hooks.attached();
    let mut states = BTreeMap::new();
    for device in devices.iter().filter(|device| selection.takes(device)) {
        let known = before.and_then(|states| states.get(&device.ifindex));
        // They may have been removed externally, or the device went to another network namespace and came back.
        let complete = attached.get(&device.ifindex).copied().unwrap_or_default();
        let works = complete && known.is_some_and(|state| state.problem.is_none());
        let problem = if works { None } else { hooks.attach(device).err().map(|error| error.to_string()) };
        match (&problem, known) {
            (None, None) => tracing::info!(device = device.name, "packet programs attached"),
            (None, Some(_)) if !works => {
                // One that had a problem was never taken away.
                if known.is_some_and(|state| state.problem.is_none()) {
                    hooks.attached_again();
                }
                tracing::info!(device = device.name, "packet programs attached again");
            }
            (Some(problem), known) if known.and_then(|k| k.problem.as_ref()) != Some(problem) => {
                tracing::warn!(device = device.name, problem, "cannot attach packet programs to this device");
            }
            _ => {}
        }
        states.insert(device.ifindex, DeviceState { name: device.name.clone(), problem });
    }
    for ifindex in attached.into_keys() {
        if !states.contains_key(&ifindex) {
            match hooks.detach(ifindex) {
                Ok(()) => tracing::info!(ifindex, "packet programs removed"),
                Err(error) => tracing::warn!(ifindex, %error, "cannot remove packet programs"),
            }
        }
    }
    states
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use super::*;

    /// Remembers what it was asked, and fails on one device until told otherwise.
    #[derive(Default)]
    struct Hooks {
        broken: Mutex<Option<u32>>,
        attached: Mutex<BTreeSet<u32>>,
        calls: Mutex<Vec<(&'static str, u32)>>,
    }

    impl DeviceHooks for Hooks {
        type Error = String;

        fn attach(&self, device: &Device) -> Result<(), String> {
            self.calls.lock().unwrap().push(("attach", device.ifindex));
            if *self.broken.lock().unwrap() == Some(device.ifindex) {
                return Err("broken".to_owned());
            }
            self.attached.lock().unwrap().insert(device.ifindex);
            Ok(())
        }

        fn detach(&self, ifindex: u32) -> Result<(), String> {
            self.calls.lock().unwrap().push(("detach", ifindex));
            self.attached.lock().unwrap().remove(&ifindex);
            Ok(())
        }

        fn attached(&self) -> BTreeMap<u32, bool> {
            self.attached.lock().unwrap().iter().map(|ifindex| (*ifindex, true)).collect()
        }
    }

    fn device(ifindex: u32) -> Device {
        Device { ifindex, name: format!("veth{ifindex}"), ethernet: true, ..Device::default() }
    }

    fn pass(
        hooks: &Hooks,
        before: Option<&BTreeMap<u32, DeviceState>>,
        devices: &[u32],
    ) -> BTreeMap<u32, DeviceState> {
        let devices: Vec<_> = devices.iter().copied().map(device).collect();
        reconcile(&Selection::default(), hooks, before, &devices)
    }

    #[test]
    fn a_second_pass_does_nothing() {
        let hooks = Hooks::default();
        let first = pass(&hooks, None, &[2, 3]);
        let second = pass(&hooks, Some(&first), &[2, 3]);
        assert_eq!(first, second);
        assert_eq!(*hooks.calls.lock().unwrap(), [("attach", 2), ("attach", 3)]);
    }

    #[test]
    fn what_was_removed_externally_is_restored() {
        let hooks = Hooks::default();
        let first = pass(&hooks, None, &[2, 3]);
        hooks.attached.lock().unwrap().remove(&3);
        pass(&hooks, Some(&first), &[2, 3]);
        assert_eq!(*hooks.calls.lock().unwrap(), [("attach", 2), ("attach", 3), ("attach", 3)]);
    }

    #[test]
    fn what_failed_is_tried_again_and_the_others_go_on() {
        let hooks = Hooks::default();
        *hooks.broken.lock().unwrap() = Some(2);
        let first = pass(&hooks, None, &[2, 3]);
        assert_eq!(first[&2].problem.as_deref(), Some("broken"));
        assert_eq!(first[&3].problem, None);
        *hooks.broken.lock().unwrap() = None;
        let second = pass(&hooks, Some(&first), &[2, 3]);
        assert_eq!(second[&2].problem, None);
        assert_eq!(*hooks.calls.lock().unwrap(), [("attach", 2), ("attach", 3), ("attach", 2)]);
    }

    #[test]
    fn a_device_that_went_is_forgotten_even_when_an_earlier_agent_attached_it() {
        let hooks = Hooks::default();
        hooks.attached.lock().unwrap().insert(9);
        let states = pass(&hooks, None, &[2]);
        assert_eq!(states.keys().copied().collect::<Vec<_>>(), [2]);
        assert_eq!(*hooks.calls.lock().unwrap(), [("attach", 2), ("detach", 9)]);
    }
}
