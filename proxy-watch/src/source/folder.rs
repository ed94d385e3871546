//! Watches a folder of manifests.
//!
//! The files `*.yaml`, `*.yml` and `*.json` are read in the order of their names; subfolders and hidden files are not. If a
//! file cannot be read or parsed, its previous objects stay, and the other files are used. So it is if a file becomes empty: a full
//! disk leaves such a file.

use std::collections::btree_map::Entry;
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
use tokio::sync::{oneshot, watch};
use tokio::time::sleep;
use tracing::{error, info, warn};

use proxy_core::model::nearest::{did_you_mean, nearest};
use proxy_core::model::{EndpointSlice, Event, Listing, NodeView, Service};

use super::debounce::{Touch, debounce, touches};
use super::manifest::{Objects, Syntax, parse};

/// Period in which the folder is read without a notification, because some file systems send none.
const POLL: Duration = Duration::from_secs(5);
/// The same period if the kernel cannot watch the folder.
const POLL_UNWATCHED: Duration = Duration::from_secs(1);
/// The most changes that wait to be processed. Further ones are dropped, because the whole folder is read anyway.
const TOUCHES: usize = 256;

/// The role of a folder.
#[derive(Debug)]
pub enum Role {
    /// It is the only source of objects.
    Alone,
    /// It is used in addition to an API server: its Services are static Services, and its Nodes are ignored.
    BesideApiServer {
        /// Signals that the initial content was sent, or that the folder could not be read. The API server's objects may
        /// follow only after it: a first sync without the folder would remove the static Services of an earlier agent.
        begun: oneshot::Sender<()>,
    },
}

/// Reads `dir` and sends all its objects, again after each change.
///
/// Runs until the receiver is dropped, whatever happens to the folder. Sends nothing until the folder could be read for the
/// first time, so that nothing counts as deleted. `problems` gets what cannot be read now, in sentences.
pub async fn run(dir: PathBuf, role: Role, sender: Sender<Event>, problems: watch::Sender<Vec<String>>) {
    let (is_alone, mut begun) = match role {
        Role::Alone => (true, None),
        Role::BesideApiServer { begun } => (false, Some(begun)),
    };
    let mut folder = Folder::new(dir, is_alone);
    let mut watch = Watch::new();
    let mut was_sent = false;
    // A folder without Nodes does not mean that the cluster has none.
    let mut has_nodes = false;
    loop {
        // Watch the folder before reading it, so that no change is missed between the two.
        watch.renew(&folder.dir);
        // Reading and parsing thousands of objects would block every other task of this thread.
        let Ok((read, is_changed)) = tokio::task::spawn_blocking(move || folder.read()).await else { return };
        folder = read;
        let now = folder.problems();
        problems.send_if_modified(|known| {
            *known != now && {
                *known = now;
                true
            }
        });
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
            // The receiver is dropped if the agent is shutting down.
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

    /// Watches `dir`; starts a new watch if another folder has this name now.
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
                // If the queue is full, the folder will be read anyway.
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

    /// Waits until the folder may have changed.
    async fn changed(&mut self) {
        let poll = if self.watcher.is_some() { POLL } else { POLL_UNWATCHED };
        tokio::select! {
            Some(touch) = self.touches.recv() => debounce(touch, &mut self.touches).await,
            () = sleep(poll) => {}
        }
    }
}

/// The content of the folder, as far as it could be read.
struct Folder {
    dir: PathBuf,
    files: BTreeMap<OsString, File>,
    /// Whether the folder could be read at least once.
    is_readable: bool,
    failure: Option<String>,
    /// Whether all Services come from the folder.
    is_alone: bool,
    /// Objects that are not used, in sentences: an earlier one has the same name, or no file has their Service.
    unused: Vec<String>,
}

#[derive(Default)]
struct File {
    digest: Option<u64>,
    objects: Objects,
    failure: Option<String>,
}

impl Folder {
    fn new(dir: PathBuf, is_alone: bool) -> Self {
        Self { dir, files: BTreeMap::new(), is_readable: false, failure: None, is_alone, unused: Vec::new() }
    }

    /// Reads the folder. Returns whether its objects may have changed.
    fn read(mut self) -> (Self, bool) {
        let names = match names(&self.dir) {
            Ok(names) => names,
            Err(error) => {
                let text = error.to_string();
                if self.failure.as_ref() != Some(&text) {
                    error!(dir = %self.dir.display(), error = text, "cannot read the folder; {}", stays(self.is_readable));
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
            match read(&path) {
                // The file was removed after the folder was listed, or it is a dangling link.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    is_changed |= self.files.remove(&name).is_some();
                }
                content => is_changed |= self.files.entry(name).or_default().update(&path, content),
            }
        }
        if is_changed {
            let mut now = self.find_repeated();
            if self.is_alone {
                now.extend(self.find_without_service());
            }
            for problem in now.iter().filter(|problem| !self.unused.contains(problem)) {
                warn!("{problem}");
            }
            self.unused = now;
        }
        (self, is_changed)
    }

    fn find_repeated(&self) -> Vec<String> {
        let mut first = BTreeMap::new();
        let mut found = Vec::new();
        for (file, File { objects, .. }) in &self.files {
            let services = objects.services.iter().map(|service| format!("Service {}", service.name));
            let slices = objects.slices.iter().map(|slice| format!("EndpointSlice {}", slice.name));
            for object in services.chain(slices) {
                match first.entry(object) {
                    Entry::Vacant(place) => {
                        place.insert(file);
                    }
                    Entry::Occupied(other) => found.push(format!(
                        "{}: {} is ignored, because {} has one of this name: rename or remove one of them",
                        self.dir.join(file).display(),
                        other.key(),
                        other.get().display(),
                    )),
                }
            }
        }
        found
    }

    fn find_without_service(&self) -> Vec<String> {
        let services = self.files.values().flat_map(|file| &file.objects.services);
        let mut services: BTreeSet<String> = services.map(|service| service.name.to_string()).collect();
        services.extend(self.files.values().flat_map(|file| &file.objects.others).cloned());
        let slices = self
            .files
            .iter()
            .flat_map(|(file, content)| content.objects.slices.iter().map(move |slice| (file, slice)));
        slices
            .filter_map(|(file, slice)| {
                let service = slice.service.to_string();
                (!services.contains(&service)).then(|| {
                    let of_namespace = format!("{}/", slice.name.namespace);
                    let known = services.iter().filter_map(|one| one.strip_prefix(&*of_namespace));
                    let near = nearest(&slice.service.name, known);
                    format!(
                        "{}: EndpointSlice {} is ignored, because no file has the Service {service}{}",
                        self.dir.join(file).display(),
                        slice.name,
                        did_you_mean(&near),
                    )
                })
            })
            .collect()
    }

    /// Returns what cannot be read now, in sentences.
    fn problems(&self) -> Vec<String> {
        let of_folder = self.failure.iter().map(|error| {
            format!(
                "the folder {} cannot be read ({error}): {}; check --manifests",
                self.dir.display(),
                stays(self.is_readable)
            )
        });
        let of_files = self.files.iter().filter_map(|(name, file)| {
            let error = file.failure.as_ref()?;
            let path = self.dir.join(name);
            Some(format!("{} is not used: {error}; {}", path.display(), stays(file.is_used())))
        });
        of_folder.chain(of_files).chain(self.unused.iter().cloned()).collect()
    }

    /// Returns all objects. Of two with the same name, the one in the file that sorts first is used.
    fn objects(&self) -> (Vec<Service>, Vec<EndpointSlice>, Vec<NodeView>) {
        let (mut services, mut slices, mut nodes) = (Vec::new(), Vec::new(), BTreeMap::new());
        let (mut service_names, mut slice_names) = (BTreeSet::new(), BTreeSet::new());
        for File { objects, .. } in self.files.values() {
            for node in &objects.nodes {
                nodes.entry(node.name.clone()).or_insert_with(|| node.clone());
            }
            let first_services =
                objects.services.iter().filter(|service| service_names.insert(&service.name));
            services.extend(first_services.cloned());
            let first_slices = objects.slices.iter().filter(|slice| slice_names.insert(&slice.name));
            slices.extend(first_slices.cloned());
        }
        (services, slices, nodes.into_values().collect())
    }
}

impl File {
    /// Parses the content of the file if it is new. Returns whether the objects may have changed.
    fn update(&mut self, path: &Path, content: io::Result<Vec<u8>>) -> bool {
        let content = match content {
            Ok(content) => content,
            Err(error) => {
                // Parse the next content in any case.
                self.digest = None;
                self.report(path, error.to_string());
                return false;
            }
        };
        if self.is_used() && content.trim_ascii().is_empty() {
            self.digest = None;
            self.report(
                path,
                "it is empty now; to remove its objects, delete it or write an empty List".to_owned(),
            );
            return false;
        }
        let digest = digest(&content);
        if self.digest == Some(digest) {
            return false;
        }
        self.digest = Some(digest);
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        let syntax = if is_json { Syntax::Json } else { Syntax::Yaml };
        let parsed = String::from_utf8(content)
            .map_err(|error| format!("it is not UTF-8 text ({})", error.utf8_error()))
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

    /// Whether objects of the file are programmed.
    const fn is_used(&self) -> bool {
        let Objects { services, slices, nodes, .. } = &self.objects;
        !services.is_empty() || !slices.is_empty() || !nodes.is_empty()
    }

    fn report(&mut self, path: &Path, error: String) {
        if self.failure.as_ref() != Some(&error) {
            error!(file = %path.display(), error, "cannot use the file; {}", stays(self.is_used()));
            self.failure = Some(error);
        }
    }
}

/// Returns what is programmed of a folder or file that cannot be used now; `was_read`: it could be used before.
const fn stays(was_read: bool) -> &'static str {
    if was_read { "its previous content stays programmed" } else { "nothing of it is programmed" }
}

/// Reads a manifest. Only regular files are read: a FIFO without a writer would block forever, and a device has no end.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    if fs::metadata(path)?.is_file() {
        fs::read(path)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))
    }
}

/// Returns the names of the manifests in the folder.
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
