//! How commands write their answers: tables for people, JSON and YAML for programs, and lists that are watched.

mod columns;
mod document;
mod error;
mod input;
mod list;
mod table;
mod watch;

pub use columns::{BACKENDS, FLOWS, FRONTENDS, MAPS, PROGRAMMED, RATES, SETTINGS, STATS, columns};
pub use document::{document, json, yaml};
pub use error::ListError;
pub use input::input_end;
pub use list::{Column, List, Row};
pub use table::{Table, age, bytes};
pub use watch::{Watch, write_list};
