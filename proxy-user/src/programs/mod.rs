//! Loads, attaches, pins, replaces and removes the BPF programs.
//!
//! Everything here blocks for milliseconds; async code calls it on the blocking pool. Nothing is detached when the
//! agent ends: links and maps are pinned, and the next agent takes them over.

pub mod bpf;
pub mod cleanup;
pub mod hooks;
pub mod pins;

mod calls;
mod capacities;
mod clock;
mod clsact;
mod current_maps;
mod device;
mod devices;
mod elsewhere;
mod embedded;
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
mod probe;
mod program;
mod repair;
mod repairs;
mod settings;
mod status;
mod verify;
mod xdp;

pub use capacities::Capacities;
pub use cleanup::{Cleanup, DetachHooks, cleanup, cleanup_before, dry_run};
pub use current_maps::CurrentMaps;
pub use elsewhere::{PinnedElsewhere, pinned_elsewhere};
pub use embedded::{EMBEDDED, release_object};
pub use error::Error;
pub use forbidden::{Forbidden, forbidden};
pub use iterator::{Iterated, SocketIterator};
pub use kernel::{
    MissingFeature, OLDEST, interleaves_packets, is_too_old, known_missing_features, missing_features,
};
pub use links::AttachOutcome;
pub use loaded::{ProgramStatus, Programs, require_unused};
pub use notice::StartNotice;
pub use object::{create_segments, load_packet_path};
pub use pins::{DIRECTORY, ensure_bpffs as mount_bpffs, is_bpffs, require_owner_of};
pub use privileges::{missing as missing_capabilities, require as require_capabilities};
pub use probe::{MAPS, PROGRAMS, loaded_names, missing_maps, missing_programs};
pub use repair::Repair;
pub use repairs::Repairs;
pub use settings::{ClsactPriority, PacketHook, Settings, TcxOrder};
pub use status::{Attachment, attachments};
pub use xdp::keeper::{AttachedXdp, Xdp, XdpDevice, XdpDevices};
