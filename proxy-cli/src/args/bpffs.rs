//! Location of the agent's programs and maps.

use std::path::PathBuf;

/// What each command takes that reads or changes them.
#[derive(Clone, Debug, clap::Args)]
pub struct BpffsArgs {
    /// Mount point of the BPF file system that the agent uses.
    #[arg(long, env = "BALLAST_BPFFS", value_name = "DIR", default_value = "/sys/fs/bpf")]
    pub bpffs: PathBuf,
}
