//! Notices for the operator about a start.

use std::fmt;
use std::path::PathBuf;

use super::kernel::MissingFeature;

/// Information about a start for the operator, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StartNotice {
    /// A map keeps the size that it has, although another one was requested.
    SizeKept {
        /// The map.
        map: &'static str,
        /// The setting that asks for another size.
        setting: &'static str,
        /// Number of entries that the map has.
        kept: u32,
        /// Number of entries requested.
        max_entries: u32,
        /// Whether the requested size comes only from the node's memory, not from a flag.
        by_memory: bool,
    },
    /// Another object was pinned in place of a map.
    PinRefused {
        /// The map.
        map: &'static str,
        /// What is wrong with the object.
        reason: String,
        /// The new path of the object.
        moved_to: PathBuf,
    },
    /// There was no bpffs, and one was mounted.
    Mounted {
        /// The mount point.
        path: PathBuf,
    },
    /// The kernel lacks a feature that Ballast can do without.
    KernelLacks(MissingFeature),
}

impl StartNotice {
    /// Whether the notice is a warning; otherwise it is only for information.
    pub const fn is_warning(&self) -> bool {
        match self {
            Self::SizeKept { by_memory, .. } => !*by_memory,
            Self::PinRefused { .. } => true,
            Self::Mounted { .. } | Self::KernelLacks(_) => false,
        }
    }
}

impl fmt::Display for StartNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SizeKept { map, kept, max_entries, by_memory: true, .. } => {
                write!(
                    f,
                    "map {map} keeps its size of {kept} entries; with this node's memory a new map would have {max_entries}. To change it, drain the node and run `ballast cleanup`"
                )
            }
            Self::SizeKept { map, setting: "", kept, max_entries, .. } => {
                write!(
                    f,
                    "map {map} keeps its size of {kept} entries; this version would create it with {max_entries}. To change it, drain the node and run `ballast cleanup`"
                )
            }
            Self::SizeKept { map, setting, kept, max_entries, .. } => {
                write!(
                    f,
                    "map {map} keeps its size of {kept} entries, although {setting} is {max_entries}. To change it, drain the node and run `ballast cleanup` before the next start"
                )
            }
            Self::PinRefused { map, reason, moved_to } => {
                write!(
                    f,
                    "the object pinned as map {map} is not Ballast's: {reason}. It was moved to {}, and a new map was created",
                    moved_to.display()
                )
            }
            Self::KernelLacks(feature) => write!(f, "this kernel lacks {feature}"),
            Self::Mounted { path } => {
                write!(
                    f,
                    "mounted a bpffs at {}. It disappears with this mount namespace: in a container, mount the host's bpffs, otherwise a restart interrupts connections",
                    path.display()
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bpffs_that_was_mounted_is_no_warning() {
        assert!(!StartNotice::Mounted { path: "/sys/fs/bpf".into() }.is_warning());
        let refused =
            StartNotice::PinRefused { map: "slots", reason: String::new(), moved_to: PathBuf::new() };
        assert!(refused.is_warning());
    }

    #[test]
    fn a_kept_size_names_the_setting_and_the_way_out() {
        let (setting, by_memory) = ("--max-slots", false);
        let notice = StartNotice::SizeKept { map: "slots", setting, kept: 5, max_entries: 9, by_memory };
        assert!(notice.is_warning());
        let text = notice.to_string();
        assert!(
            text.contains("slots") && text.contains("--max-slots") && text.contains("ballast cleanup"),
            "{text}"
        );
        let notice =
            StartNotice::SizeKept { map: "slots", setting, kept: 5, max_entries: 10, by_memory: true };
        assert!(!notice.is_warning() && !notice.to_string().contains(setting), "{notice}");
    }
}
