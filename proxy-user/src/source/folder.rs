//! A folder of manifests, watched.
//!
//! Its files `*.yaml`, `*.yml` and `*.json` are read, in the order of their names; folders in it and hidden
//! files are not. A file that cannot be read or parsed keeps what it last held; the others count.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::sync::oneshot;
use tokio::time::sleep;
use tracing::{error, info, warn};

use crate::model::{EndpointSlice, Event, Listing, NodeView, Service};

use super::debounce::{Touch, debounce, touches};
use super::manifest::{Objects, Syntax, parse};

/// How often the folder is read without a notification: some file systems send none.
const POLL: Duration = Duration::from_secs(5);
/// The same where the kernel does not watch the folder for us.
const POLL_UNWATCHED: Duration = Duration::from_secs(1);
/// Changes that may wait to be looked at; beyond that they are forgotten, as the folder is read as a whole.
const TOUCHES: usize = 256;

/// What a folder is.
#[derive(Debug)]
pub enum Role {
    /// All that there is.
    Alone,
    /// Beside an API server: its Services are static ones, its Nodes do not count.
    BesideApiServer {
        /// What it held at the start was sent, or it could not be read: what the API server has may come. A first sync
        /// without the folder would remove the static Services of an earlier agent.
        begun: oneshot::Sender<()>,
    },
}

/// Reads `dir`, and sends all that it holds, again with each change of it.
///
/// Runs for ever, whatever happens to the folder; returns when the receiver is gone. Until the folder can be
/// read for the first time nothing is sent, so nothing counts as deleted.
pub async fn run(dir: PathBuf, role: Role, sender: Sender<Event>) {
    let mut folder = Folder::new(dir);
    let mut watch = Watch::new();
    let mut was_sent = false;
    // Who has no Node in the folder does not say that there are none.
    let mut has_nodes = false;
    let (is_alone, mut begun) = match role {
        Role::Alone => (true, None),
        Role::BesideApiServer { begun } => (false, Some(begun)),
    };
    loop {
        // Before the folder is read, so that no change falls between the two.
        watch.renew(&folder.dir);
        // Reading and parsing thousands of objects would hold up every other task of this thread.
        let Ok((read, is_changed)) = tokio::task::spawn_blocking(move || folder.read()).await else { return };
        folder = read;
        if folder.is_readable && (is_changed || !was_sent) {
            let (services, slices, nodes) = folder.objects();
            info!(dir = %folder.dir.display(), services = services.len(), slices = slices.len(), "manifests read");
            has_nodes |= !nodes.is_empty();
            let events = if is_alone {
                let nodes = has_nodes.then_some(Listing::Others(nodes));
                let others = [Listing::Services(services), Listing::Slices(slices)];
                nodes.into_iter().chain(others).map(Event::Reset).collect()
            } else {
                vec![Event::Static { services, slices }]
            };
            for event in events {
                if sender.send(event).await.is_err() {
                    return;
                }
            }
            was_sent = true;
        }
        if let Some(begun) = begun.take() {
            // The receiver is gone when the agent is ending.
            let _ = begun.send(());
        }
        tokio::select! {
            () = sender.closed() => return,
            () = watch.changed() => {}
        }
    }
}

/// The kernel's watch of the folder.
struct Watch {
    sender: Sender<Touch>,
    touches: Receiver<Touch>,
    watcher: Option<(RecommendedWatcher, (u64, u64))>,
    has_warned: bool,
}

impl Watch {
    fn new() -> Self {
        let (sender, touches) = mpsc::channel(TOUCHES);
        Self { sender, touches, watcher: None, has_warned: false }
    }

    /// Watches `dir`, anew if it is another folder of that name now.
    fn renew(&mut self, dir: &Path) {
        let Ok(now) = fs::metadata(dir).map(|m| (m.dev(), m.ino())) else {
            self.watcher = None;
            return;
        };
        if self.watcher.as_ref().is_some_and(|(_, watched)| *watched == now) {
            return;
        }
        let sender = self.sender.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            for touch in event.map(touches).into_iter().flatten() {
                // A full queue already says that there is something to read.
                let _ = sender.try_send(touch);
            }
        })
        .and_then(|mut watcher| watcher.watch(dir, RecursiveMode::NonRecursive).map(|()| watcher));
        match watcher {
            Ok(watcher) => self.watcher = Some((watcher, now)),
            Err(error) => {
                self.watcher = None;
                if !std::mem::replace(&mut self.has_warned, true) {
                    warn!(dir = %dir.display(), %error, "cannot watch the folder; reading it every second instead");
                }
            }
        }
    }

    /// Returns when there may be something new.
    async fn changed(&mut self) {
        let poll = if self.watcher.is_some() { POLL } else { POLL_UNWATCHED };
        tokio::select! {
            Some(touch) = self.touches.recv() => debounce(touch, &mut self.touches).await,
            () = sleep(poll) => {}
        }
    }
}

/// What the folder holds, as far as it could be read.
struct Folder {
    dir: PathBuf,
    files: BTreeMap<OsString, File>,
    /// Whether the folder itself has been read once.
    is_readable: bool,
    failure: Option<String>,
}

#[derive(Default)]
struct File {
    digest: Option<u64>,
    objects: Objects,
    failure: Option<String>,
}

impl Folder {
    fn new(dir: PathBuf) -> Self {
        Self { dir, files: BTreeMap::new(), is_readable: false, failure: None }
    }

    /// Reads the folder. Returns whether what it holds may have changed.
    fn read(mut self) -> (Self, bool) {
        let names = match names(&self.dir) {
            Ok(names) => names,
            Err(error) => {
                let text = error.to_string();
                if self.failure.as_ref() != Some(&text) {
                    error!(dir = %self.dir.display(), error = text, "cannot read the folder; its previous content stays programmed");
                    self.failure = Some(text);
                }
                return (self, false);
            }
        };
        self.failure = None;
        self.is_readable = true;
        let known = self.files.len();
        self.files.retain(|name, _| names.contains(name));
        let mut is_changed = self.files.len() != known;
        for name in names {
            let path = self.dir.join(&name);
            match fs::read(&path) {
                // It went between the two, or the link leads nowhere.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    is_changed |= self.files.remove(&name).is_some();
                }
                content => is_changed |= self.files.entry(name).or_default().update(&path, content),
            }
        }
        (self, is_changed)
    }

    /// All objects. Of two that have the same name the one in the file that sorts first counts.
    fn objects(&self) -> (Vec<Service>, Vec<EndpointSlice>, Vec<NodeView>) {
        let (mut services, mut slices, mut nodes) = (Vec::new(), Vec::new(), BTreeMap::new());
        let (mut service_names, mut slice_names) = (BTreeSet::new(), BTreeSet::new());
        for (file, File { objects, .. }) in &self.files {
            let file = file.display();
            for node in &objects.nodes {
                nodes.entry(node.name.clone()).or_insert_with(|| node.clone());
            }
            for service in &objects.services {
                if service_names.insert(&service.name) {
                    services.push(service.clone());
                } else {
                    warn!(%file, service = %service.name, "duplicate Service; the first one is used");
                }
            }
            for slice in &objects.slices {
                if slice_names.insert(&slice.name) {
                    slices.push(slice.clone());
                } else {
                    warn!(%file, slice = %slice.name, "duplicate EndpointSlice; the first one is used");
                }
            }
        }
        (services, slices, nodes.into_values().collect())
    }
}

impl File {
    /// Takes in what was read. Returns whether the objects may have changed.
    fn update(&mut self, path: &Path, content: io::Result<Vec<u8>>) -> bool {
        let content = match content {
            Ok(content) => content,
            Err(error) => {
                // Whatever it is, read again next time.
                self.digest = None;
                self.report(path, error.to_string());
                return false;
            }
        };
        let digest = digest(&content);
        if self.digest == Some(digest) {
            return false;
        }
        self.digest = Some(digest);
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        let syntax = if is_json { Syntax::Json } else { Syntax::Yaml };
        let parsed = String::from_utf8(content)
            .map_err(|error| error.to_string())
            .and_then(|text| parse(&text, syntax).map_err(|error| error.to_string()));
        match parsed {
            Ok(objects) => {
                self.objects = objects;
                self.failure = None;
                true
            }
            Err(error) => {
                self.report(path, error);
                false
            }
        }
    }

    fn report(&mut self, path: &Path, error: String) {
        if self.failure.as_ref() != Some(&error) {
            error!(file = %path.display(), error, "cannot use the file; its previous content stays programmed");
            self.failure = Some(error);
        }
    }
}

/// The names of the manifests in the folder.
fn names(dir: &Path) -> io::Result<BTreeSet<OsString>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let path = Path::new(&name);
        let is_manifest =
            path.extension().is_some_and(|extension| ["yaml", "yml", "json"].iter().any(|e| extension == *e));
        let is_hidden = name.as_encoded_bytes().starts_with(b".");
        if is_manifest && !is_hidden && !entry.path().is_dir() {
            names.insert(name);
        }
    }
    Ok(names)
}

fn digest(content: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
