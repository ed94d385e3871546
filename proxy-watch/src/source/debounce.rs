//! Detects when a change of the folder is complete.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, CreateKind, ModifyKind};
use notify::{Event, EventKind};
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, timeout_at};

/// Time to wait for more changes after a complete one: `kubectl` and editors replace several files in a row.
const AFTER_COMPLETE: Duration = Duration::from_millis(10);
/// Time to wait for the end of a write: half of a file may be a valid manifest.
const WHILE_WRITTEN: Duration = Duration::from_millis(250);
/// The longest wait in total; after it, the folder is read in any case.
const AT_MOST: Duration = Duration::from_secs(2);

/// What an event of the file system means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Touch {
    /// A process writes to this file.
    Writing(PathBuf),
    /// The file was closed after writing, moved or removed.
    Complete(PathBuf),
}

/// Returns the touches of an event; none if it changes nothing, as for the events of our own reads.
pub fn touches(event: Event) -> impl Iterator<Item = Touch> {
    let touch: Option<fn(PathBuf) -> Touch> = match event.kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write))
        | EventKind::Remove(_)
        | EventKind::Modify(ModifyKind::Name(_) | ModifyKind::Metadata(_))
        | EventKind::Create(CreateKind::Folder)
        | EventKind::Other
        | EventKind::Any => Some(Touch::Complete),
        EventKind::Create(_) | EventKind::Modify(_) => Some(Touch::Writing),
        EventKind::Access(_) => None,
    };
    // An event without a path means that events were lost.
    let paths = if event.paths.is_empty() { vec![PathBuf::new()] } else { event.paths };
    touch.into_iter().flat_map(move |touch| paths.clone().into_iter().map(touch))
}

/// Waits until the change that began with `first` is complete.
pub async fn debounce(first: Touch, touches: &mut Receiver<Touch>) {
    let end = Instant::now() + AT_MOST;
    let mut being_written = BTreeSet::new();
    let mut next = Some(first);
    while let Some(touch) = next {
        match touch {
            Touch::Writing(path) => {
                being_written.insert(path);
            }
            Touch::Complete(path) => {
                being_written.remove(&path);
            }
        }
        let pause = if being_written.is_empty() { AFTER_COMPLETE } else { WHILE_WRITTEN };
        next = timeout_at(end.min(Instant::now() + pause), touches.recv()).await.ok().flatten();
    }
}
