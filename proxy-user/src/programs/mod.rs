//! Loads, attaches, pins, replaces and removes the BPF programs.
//!
//! Everything here blocks for milliseconds; async code calls it on the blocking pool. Nothing is detached when the
//! agent ends: links and maps are pinned, and the next agent takes them over.

pub mod bpf;
pub mod cleanup;
pub mod hooks;
pub mod pins;

mod calls;
mod clock;
mod clsact;
mod devices;
mod error;
mod forbidden;
mod iterator;
mod kernel;
mod leave;
mod links;
mod loaded;
mod notice;
mod object;
mod privileges;
mod program;
mod repair;
mod repairs;
mod settings;
mod status;
mod xdp;

pub use cleanup::{Cleanup, DetachHooks, cleanup, cleanup_before, dry_run};
pub use error::Error;
pub use forbidden::{Forbidden, forbidden};
pub use iterator::{CurrentMaps, Iterated, SocketIterator};
pub use kernel::{
    MAPS, MissingFeature, OLDEST, PROGRAMS, interleaves_packets, is_too_old, known_missing_features,
    loaded_names, missing_features, missing_maps, missing_programs,
};
pub use links::{AttachOutcome, PinnedElsewhere, pinned_elsewhere};
pub use loaded::{Programs, require_unused};
pub use notice::StartNotice;
pub use object::{EMBEDDED, create_segments, load_packet_path, release_object};
pub use pins::{DIRECTORY, ensure_bpffs as mount_bpffs, is_bpffs, require_owner_of};
pub use privileges::{missing as missing_capabilities, require as require_capabilities};
pub use repair::{Repair, Repaired};
pub use repairs::Repairs;
pub use settings::{Capacities, ClsactPriority, PacketHook, Settings, TcxOrder};
pub use status::{Attachment, attachments};
pub use xdp::keeper::{AttachedXdp, Xdp, XdpDevice, XdpDevices};
