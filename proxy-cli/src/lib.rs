//! The command line that `ballast` and `kubectl ballast` share, and the plugin itself. Nothing here reads maps or needs Linux, so the
//! plugin also builds for macOS and Windows.
//!
//! * [`args`]: the arguments of the plugin, and of the commands that it runs on the nodes; [`value`], [`question`] and [`selector`]
//!   parse them, [`complete`] and [`candidates`] complete them.
//! * [`output`]: how commands write their answers.
//! * [`kubectl`]: requests to the agents of all nodes through the API server; [`program`]: the plugin as a program.
//! * [`page`]: the server of the page, for one node or for a cluster.
//! * [`archive`], [`programmed`], [`exchange`]: what commands of both programs write and read.

pub mod archive;
pub mod args;
pub mod candidates;
pub mod complete;
pub mod exchange;
pub mod kubectl;
pub mod output;
pub mod page;
pub mod program;
pub mod programmed;
pub mod question;
pub mod selector;
pub mod value;
