//! The pinned links: which program hangs where.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use aya::programs::links::PinnedLink;
use aya::programs::loaded_programs;

use super::{View, ViewError};

/// One link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkRow {
    /// Its pin below `links`: the hook, and the device where there is one.
    pub hook: String,
    /// Number of its program in this kernel.
    pub program_id: u32,
    /// The program's name; empty when the kernel does not tell.
    pub program: String,
    /// How often the program ran, and for how long in all: zero unless `kernel.bpf_stats_enabled` is set.
    pub runs: u64,
    /// See [`LinkRow::runs`].
    pub run_time: Duration,
}

impl View {
    /// All pinned links, in order of their pins. A clsact filter has no link and is not here.
    pub fn links(&self) -> Result<Vec<LinkRow>, ViewError> {
        let folder = self.root.join("links");
        let entries = match folder.read_dir() {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(ViewError::Open { path: folder, source }),
        };
        let mut programs = BTreeMap::new();
        for info in loaded_programs().flatten() {
            programs.insert(info.id(), info);
        }
        let mut rows = Vec::new();
        for entry in entries.flatten() {
            let path = entry.path();
            // A link that was removed since the folder was listed is not an error.
            let Ok(link) = PinnedLink::from_pin(&path) else { continue };
            let Ok(info) = aya::programs::links::FdLink::from(link).info() else { continue };
            let program = programs.get(&info.program_id());
            let details = program.and_then(|p| p.fd().ok()).map(|fd| fdinfo(&fd)).unwrap_or_default();
            let number = |key: &str| details.get(key).and_then(|text| text.parse().ok()).unwrap_or_default();
            rows.push(LinkRow {
                hook: entry.file_name().to_string_lossy().into_owned(),
                program_id: info.program_id(),
                program: program.and_then(|p| p.name_as_str()).unwrap_or_default().to_owned(),
                runs: number("run_cnt"),
                run_time: Duration::from_nanos(number("run_time_ns")),
            });
        }
        rows.sort_by(|a, b| a.hook.cmp(&b.hook));
        Ok(rows)
    }
}

/// What `/proc` tells about an open BPF object; empty when it tells nothing.
pub(super) fn fdinfo(fd: &impl AsFd) -> BTreeMap<String, String> {
    let path = format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd());
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(key, value)| (key.to_owned(), value.trim().to_owned()))
        .collect()
}
