//! Keeps the packet programs on the selected devices, while devices appear, disappear and change.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};

use super::devices::{Device, LOOPBACK};
use super::follow::Devices;
use super::selection::Selection;

/// The interval of passes without a new list of devices; a pass also retries what failed.
pub const PERIOD: Duration = Duration::from_secs(10);
/// The pause after a pass in which something failed. It doubles while the same fails, up to [`PERIOD`].
const RETRY: Duration = Duration::from_secs(1);

/// The operations on a device that the manager needs. Calls block, and come from one task at a time.
pub trait DeviceHooks: Send + Sync + 'static {
    /// The error of an operation.
    type Error: Display + Send;

    /// What [`DeviceHooks::look`] finds.
    type Found;

    /// Attaches the programs to a device, or replaces those of an earlier agent.
    fn attach(&self, device: &Device) -> Result<(), Self::Error>;

    /// Whether [`DeviceHooks::attach`] failed because the device is gone.
    fn is_gone(&self, _error: &Self::Error) -> bool {
        false
    }

    /// Detaches the programs from a device that is no longer selected, or forgets a device that is gone.
    fn detach(&self, ifindex: u32) -> Result<(), Self::Error>;

    /// Called after programs that had disappeared from a device were attached again.
    fn attached_again(&self) {}

    /// Called after a pass over these devices: each selected one has its programs, or cannot have them. `found`: see
    /// [`DeviceHooks::look`], after the last change of the pass; `is_complete`: all have them, and no other device has;
    /// `has_pods`: no device of a pod is left out of the selection.
    fn after_pass(&self, _devices: &Devices, _found: &Self::Found, _is_complete: bool, _has_pods: bool) {}

    /// Asks the kernel which programs are attached to devices: several requests for each device. After an error (no memory, no
    /// descriptor) nothing is known, and nothing is changed.
    fn look(&self) -> io::Result<Self::Found>;

    /// Returns the devices with programs of this agent or an earlier one, and whether the programs are complete.
    fn attached(found: &Self::Found) -> BTreeMap<u32, bool>;
}

/// A selected device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceState {
    /// Its name.
    pub name: String,
    /// Why it has no programs of this agent; `None` if it has them.
    pub problem: Option<String>,
    /// It has no programs at all, or not all; those of an earlier agent may still be there.
    pub is_bare: bool,
}

/// The selected devices by index; `None` before the first pass.
pub type DeviceStates = Option<BTreeMap<u32, DeviceState>>;

/// Keeps the programs on the selected devices until it is dropped.
pub struct DeviceManager<H> {
    selection: Selection,
    hooks: Arc<H>,
    states: watch::Sender<DeviceStates>,
    due: watch::Sender<Option<Instant>>,
    failure: watch::Sender<Option<String>>,
    period: Duration,
}

impl<H: DeviceHooks> DeviceManager<H> {
    /// Creates a manager, and the receiver of its states.
    pub fn new(selection: Selection, hooks: Arc<H>) -> (Self, watch::Receiver<DeviceStates>) {
        let (states, receiver) = watch::channel(None);
        let (due, failure) = (watch::Sender::default(), watch::Sender::default());
        (Self { selection, hooks, states, due, failure, period: PERIOD }, receiver)
    }

    /// Publishes to `due` when the next progress is due: a pass, or a device of it; `None` before the first pass.
    #[must_use]
    pub fn with_due(self, due: watch::Sender<Option<Instant>>) -> Self {
        Self { due, ..self }
    }

    /// Returns why the last pass could do nothing.
    pub fn failure(&self) -> watch::Receiver<Option<String>> {
        self.failure.subscribe()
    }

    /// Sets the interval of passes without a change; the default is 10 s.
    #[must_use]
    pub fn with_period(self, period: Duration) -> Self {
        Self { period, ..self }
    }

    /// Runs until the sender of `devices` is dropped: one pass at the start, one for each list of devices, and periodic ones.
    pub async fn run(self, mut devices: watch::Receiver<Devices>) {
        let (mut retry, mut before) = (RETRY, Ok(BTreeMap::new()));
        self.due.send_replace(Some(Instant::now()));
        loop {
            let list = devices.borrow_and_update().clone();
            let problems = self.pass(list).await.map_err(|error| error.to_string());
            retry = if problems == before { (2 * retry).min(self.period) } else { RETRY };
            let pause = if problems.as_ref().is_ok_and(BTreeMap::is_empty) { self.period } else { retry };
            if problems.is_ok() {
                self.due.send_replace(Some(Instant::now() + pause));
            }
            let failure = problems.as_ref().err().cloned();
            if self.failure.send_if_modified(|known| std::mem::replace(known, failure.clone()) != failure)
                && let Some(error) = failure
            {
                tracing::warn!(error, "cannot look after the programs on network devices; retrying");
            }
            before = problems;
            if let Ok(Err(_)) = timeout(pause, devices.changed()).await {
                return;
            }
        }
    }

    /// Corrects what differs on these devices; returns their problems, by index.
    async fn pass(&self, devices: Devices) -> io::Result<BTreeMap<u32, String>> {
        let (selection, hooks) = (self.selection.clone(), Arc::clone(&self.hooks));
        let (before, due) = (self.states.borrow().clone(), self.due.clone());
        // A pass over many devices takes long, but not a single one of them.
        let progress = move || {
            due.send_replace(Some(Instant::now()));
        };
        let work = move || run_pass(&selection, &*hooks, before.as_ref(), &devices, &progress);
        let (after, unknown) = spawn_blocking(work).await?;
        let failed = after.iter().filter_map(|(ifindex, state)| Some((*ifindex, state.problem.clone()?)));
        let failed = failed.collect();
        self.states.send_if_modified(|states| {
            let modified = states.as_ref() != Some(&after);
            *states = Some(after);
            modified
        });
        unknown.map_or(Ok(failed), Err)
    }
}

/// Makes one pass over all devices; returns the new state of the selected ones, and why the kernel did not say what is attached.
/// Calls `progress` after each step.
fn run_pass<H: DeviceHooks>(
    selection: &Selection,
    hooks: &H,
    before: Option<&BTreeMap<u32, DeviceState>>,
    devices: &Devices,
    progress: &impl Fn(),
) -> (BTreeMap<u32, DeviceState>, Option<io::Error>) {
    let found = match hooks.look() {
        Ok(found) => found,
        Err(error) => return (unseen(selection, before, devices, &error), Some(error)),
    };
    progress();
    let Reconciled { states, all_detached, is_same } =
        reconcile(selection, hooks, H::attached(&found), before, devices, progress);
    let found = if is_same { Ok(found) } else { hooks.look() };
    // Without the programs on the loopback device, only some ICMP errors are lost.
    let works = |(ifindex, state): (&u32, &DeviceState)| *ifindex == LOOPBACK || state.problem.is_none();
    let is_complete = all_detached && states.iter().all(works);
    // Without a second look, the next pass does the rest.
    if let Ok(found) = found {
        progress();
        hooks.after_pass(devices, &found, is_complete, selection.left_out(devices).next().is_none());
    }
    (states, None)
}

/// Returns the states if nothing is known of the kernel's programs: new devices have none.
fn unseen(
    selection: &Selection,
    before: Option<&BTreeMap<u32, DeviceState>>,
    devices: &Devices,
    error: &io::Error,
) -> BTreeMap<u32, DeviceState> {
    let state = |device: &Device| DeviceState {
        name: device.name.clone(),
        problem: Some(format!("cannot list the programs on network devices: {error}")),
        is_bare: true,
    };
    let known = |device: &Device| before?.get(&device.ifindex).cloned();
    let selected = devices.iter().filter(|device| selection.takes(device));
    selected.map(|device| (device.ifindex, known(device).unwrap_or_else(|| state(device)))).collect()
}

/// What a pass did.
struct Reconciled {
    /// The new state of the selected devices.
    states: BTreeMap<u32, DeviceState>,
    /// Whether all other devices are without our programs.
    all_detached: bool,
    /// Whether no program was to be attached or detached.
    is_same: bool,
}

fn reconcile<H: DeviceHooks>(
    selection: &Selection,
    hooks: &H,
    attached: BTreeMap<u32, bool>,
    before: Option<&BTreeMap<u32, DeviceState>>,
    devices: &Devices,
    progress: &impl Fn(),
) -> Reconciled {
    let (mut states, mut is_same) = (BTreeMap::new(), true);
    for device in devices.iter().filter(|device| selection.takes(device)) {
        let known = before.and_then(|states| states.get(&device.ifindex));
        // The programs may have been removed externally, or the device was moved to another network namespace and back.
        let complete = attached.get(&device.ifindex).copied().unwrap_or_default();
        let works = complete && known.is_some_and(|state| state.problem.is_none());
        is_same &= works;
        let error = if works { None } else { hooks.attach(device).err() };
        progress();
        // The next list of devices lacks it.
        if error.as_ref().is_some_and(|error| hooks.is_gone(error)) {
            continue;
        }
        let problem = error.map(|error| error.to_string());
        match (&problem, known) {
            (None, None) => tracing::info!(device = device.name, "packet programs attached"),
            (None, Some(_)) if !works => {
                // A device with a problem had no programs that could have been removed.
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
        let is_bare = problem.is_some() && !complete;
        states.insert(device.ifindex, DeviceState { name: device.name.clone(), problem, is_bare });
    }
    let mut all_detached = true;
    for ifindex in attached.into_keys() {
        if !states.contains_key(&ifindex) {
            is_same = false;
            match hooks.detach(ifindex) {
                Ok(()) => tracing::info!(ifindex, "packet programs removed"),
                Err(error) => {
                    all_detached = false;
                    tracing::warn!(ifindex, %error, "cannot remove packet programs");
                }
            }
            progress();
        }
    }
    Reconciled { states, all_detached, is_same }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use super::*;
    use crate::host::seen::Seen;

    /// A device that is in the list, but gone when it is to get its programs.
    const GONE: u32 = 7;

    /// Records its calls, and fails on one device until the test resets that.
    #[derive(Default)]
    struct Hooks {
        broken: Mutex<Option<u32>>,
        attached: Mutex<BTreeSet<u32>>,
        calls: Mutex<Vec<(&'static str, u32)>>,
        looks: Mutex<u32>,
        /// Whether nothing can be read.
        is_blind: Mutex<bool>,
        is_complete: Mutex<bool>,
        /// If set, each device waits for a message before it gets its programs.
        gate: Mutex<Option<std::sync::mpsc::Receiver<()>>>,
    }

    impl DeviceHooks for Hooks {
        type Error = String;
        type Found = BTreeMap<u32, bool>;

        fn attach(&self, device: &Device) -> Result<(), String> {
            self.calls.lock().unwrap().push(("attach", device.ifindex));
            if let Some(gate) = &*self.gate.lock().unwrap() {
                gate.recv().unwrap();
            }
            if *self.broken.lock().unwrap() == Some(device.ifindex) {
                return Err("broken".to_owned());
            }
            if device.ifindex == GONE {
                return Err("gone".to_owned());
            }
            self.attached.lock().unwrap().insert(device.ifindex);
            Ok(())
        }

        fn is_gone(&self, error: &String) -> bool {
            error == "gone"
        }

        fn detach(&self, ifindex: u32) -> Result<(), String> {
            self.calls.lock().unwrap().push(("detach", ifindex));
            self.attached.lock().unwrap().remove(&ifindex);
            Ok(())
        }

        fn after_pass(&self, _: &Devices, found: &Self::Found, is_complete: bool, _: bool) {
            assert_eq!(*found, self.now());
            *self.is_complete.lock().unwrap() = is_complete;
        }

        fn look(&self) -> io::Result<BTreeMap<u32, bool>> {
            *self.looks.lock().unwrap() += 1;
            if *self.is_blind.lock().unwrap() {
                return Err(io::Error::from_raw_os_error(libc::EMFILE));
            }
            Ok(self.now())
        }

        fn attached(found: &Self::Found) -> BTreeMap<u32, bool> {
            found.clone()
        }
    }

    impl Hooks {
        fn now(&self) -> BTreeMap<u32, bool> {
            self.attached.lock().unwrap().iter().map(|ifindex| (*ifindex, true)).collect()
        }
    }

    fn device(ifindex: u32) -> Device {
        Device { ifindex, name: format!("veth{ifindex}"), ethernet: true, ..Device::default() }
    }

    fn list(devices: &[u32]) -> Devices {
        Seen::start(|| Ok(devices.iter().copied().map(device).collect())).unwrap().present()
    }

    fn overdue(due: &watch::Receiver<Option<Instant>>) -> Duration {
        due.borrow().unwrap().elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn slow_pass_makes_progress_with_each_device_and_blocked_one_does_not() {
        let (open, gate) = std::sync::mpsc::channel();
        let hooks = Arc::new(Hooks { gate: Mutex::new(Some(gate)), ..Hooks::default() });
        let (manager, states) = DeviceManager::new(Selection::default(), Arc::clone(&hooks));
        let due = manager.due.subscribe();
        assert_eq!(*due.borrow(), None, "nothing is expected before the start");
        let (_devices, receiver) = watch::channel(list(&[2, 3, 4]));
        let running = tokio::spawn(manager.run(receiver));
        let waits_for = async |count| {
            while hooks.calls.lock().unwrap().len() < count {
                tokio::task::yield_now().await;
            }
        };
        for device in 1..=3 {
            waits_for(device).await;
            tokio::time::advance(Duration::from_secs(50)).await;
            let late = overdue(&due);
            assert!(late >= Duration::from_secs(50) && late < Duration::from_mins(1), "{late:?}");
            open.send(()).unwrap();
        }
        while states.borrow().is_none() {
            tokio::task::yield_now().await;
        }
        assert_eq!(overdue(&due), Duration::ZERO);
        tokio::time::advance(PERIOD).await;
        assert_eq!(overdue(&due), Duration::ZERO, "no progress is due before the next pass");
        running.abort();
    }

    fn pass(
        hooks: &Hooks,
        before: Option<&BTreeMap<u32, DeviceState>>,
        devices: &[u32],
    ) -> BTreeMap<u32, DeviceState> {
        let devices = list(devices);
        let states = run_pass(&Selection::default(), hooks, before, &devices, &|| ()).0;
        let has_problem = states.values().any(|state| state.problem.is_some());
        assert_eq!(*hooks.is_complete.lock().unwrap(), !has_problem);
        states
    }

    #[test]
    fn a_second_pass_does_nothing() {
        let hooks = Hooks::default();
        let first = pass(&hooks, None, &[2, 3]);
        let second = pass(&hooks, Some(&first), &[2, 3]);
        assert_eq!(first, second);
        assert_eq!(*hooks.calls.lock().unwrap(), [("attach", 2), ("attach", 3)]);
        assert_eq!(
            *hooks.looks.lock().unwrap(),
            3,
            "twice, because the first pass attached programs, and once"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn programs_that_cannot_be_read_change_nothing() {
        let hooks = Arc::new(Hooks::default());
        let (manager, states) = DeviceManager::new(Selection::default(), Arc::clone(&hooks));
        let (failure, due) = (manager.failure(), manager.due.subscribe());
        let (devices, receiver) = watch::channel(list(&[2]));
        let running = tokio::spawn(manager.run(receiver));
        while states.borrow().is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let (before, calls) = (states.borrow().clone(), hooks.calls.lock().unwrap().clone());
        *hooks.is_blind.lock().unwrap() = true;
        *hooks.looks.lock().unwrap() = 0;
        assert_eq!(*failure.borrow(), None);
        tokio::time::sleep(Duration::from_mins(1)).await;
        assert!(failure.borrow().as_ref().is_some_and(|error| error.contains("open files")), "{failure:?}");
        assert!(overdue(&due) > Duration::from_secs(45), "such a pass is no progress");
        assert_eq!((states.borrow().clone(), hooks.calls.lock().unwrap().clone()), (before, calls));
        let looks = *hooks.looks.lock().unwrap();
        assert!((5..=10).contains(&looks), "the pause grows: {looks}");
        // A new device has no programs.
        devices.send_replace(list(&[2, 3]));
        tokio::time::sleep(Duration::from_secs(1)).await;
        let states = states.borrow().clone().unwrap();
        assert!(states[&2].problem.is_none() && states[&3].is_bare, "{states:?}");
        assert!(
            states[&3].problem.as_ref().is_some_and(|problem| problem.contains("cannot list")),
            "{states:?}"
        );
        running.abort();
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
        assert_eq!((first[&2].problem.as_deref(), first[&2].is_bare), (Some("broken"), true));
        assert_eq!((first[&3].problem.as_deref(), first[&3].is_bare), (None, false));
        *hooks.broken.lock().unwrap() = None;
        let second = pass(&hooks, Some(&first), &[2, 3]);
        assert_eq!(second[&2].problem, None);
        assert_eq!(*hooks.calls.lock().unwrap(), [("attach", 2), ("attach", 3), ("attach", 2)]);
    }

    #[test]
    fn device_with_programs_of_an_earlier_agent_is_not_bare() {
        let hooks = Hooks::default();
        *hooks.broken.lock().unwrap() = Some(2);
        hooks.attached.lock().unwrap().insert(2);
        let states = pass(&hooks, None, &[2]);
        assert_eq!((states[&2].problem.as_deref(), states[&2].is_bare), (Some("broken"), false));
    }

    #[test]
    fn a_device_that_goes_before_it_has_its_programs_is_no_problem() {
        let hooks = Hooks::default();
        let states = pass(&hooks, None, &[2, GONE]);
        assert_eq!(states.into_keys().collect::<Vec<_>>(), [2]);
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
