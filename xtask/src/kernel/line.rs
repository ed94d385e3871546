//! The kernel lines that the tests boot, and the suites that have their packages.

use crate::cross::Arch;

/// Distribution that packages a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distribution {
    Debian,
    Ubuntu,
}

impl Distribution {
    pub const ALL: [Self; 2] = [Self::Debian, Self::Ubuntu];

    /// Returns its name in `/etc/os-release` and in the name of its keys.
    pub const fn id(self) -> &'static str {
        match self {
            Self::Debian => "debian",
            Self::Ubuntu => "ubuntu",
        }
    }
}

/// A kernel line, such as 6.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// Name in the argument of `--kernel`.
    pub name: &'static str,
    /// Prefix of its versions; empty: the newest kernel of the suites.
    pub version: &'static str,
    /// Distribution that packages it.
    pub distribution: Distribution,
    /// Suites with its packages: a release, then its updates.
    pub suites: &'static [&'static str],
}

/// All lines, the oldest first.
pub const LINES: [Line; 7] = [
    line("5.10", Distribution::Debian, &["bullseye", "bullseye-security"]),
    line("5.13", Distribution::Ubuntu, &["focal", "focal-updates", "focal-security"]),
    line("5.15", Distribution::Ubuntu, &["jammy", "jammy-updates", "jammy-security"]),
    line("5.19", Distribution::Ubuntu, &["jammy", "jammy-updates", "jammy-security"]),
    line("6.1", Distribution::Debian, &["bookworm", "bookworm-security"]),
    line("6.12", Distribution::Debian, &["trixie", "trixie-security"]),
    Line { version: "", ..line("sid", Distribution::Debian, &["sid"]) },
];

const fn line(name: &'static str, distribution: Distribution, suites: &'static [&'static str]) -> Line {
    Line { name, version: name, distribution, suites }
}

impl Line {
    /// Returns the package of the line's newest kernel of the plain flavour; `names` has one package per line.
    pub fn newest(&self, names: &str, arch: Arch) -> Option<String> {
        let flavour = match self.distribution {
            Distribution::Debian => format!("-{}", arch.debian()),
            Distribution::Ubuntu => "-generic".to_owned(),
        };
        let of_line = |name: &&str| {
            let rest = name.strip_prefix("linux-image-").and_then(|rest| rest.strip_suffix(&flavour));
            rest.is_some_and(|rest| self.is_version(rest))
        };
        names.lines().filter(of_line).max_by_key(|name| numbers(name)).map(str::to_owned)
    }

    /// Whether `text` is a version of the line in the plain flavour: `6.1.0-56`, not `6.1.0-56-rt`.
    fn is_version(&self, text: &str) -> bool {
        let is_line = self.version.is_empty()
            || text.strip_prefix(self.version).is_some_and(|rest| rest.starts_with('.'));
        let is_full = text.split('.').count() >= 3 && text.starts_with(|c: char| c.is_ascii_digit());
        // A dash may only be followed by a build number.
        let is_plain = text.split('-').skip(1).all(|word| word.bytes().all(|byte| byte.is_ascii_digit()));
        is_line && is_full && is_plain
    }

    /// Returns the packages that contain the kernel and its modules, given the package named after the kernel. Ubuntu and
    /// newer Debian releases split a kernel into several packages.
    pub fn packages(&self, named: &str) -> Vec<String> {
        let release = named.trim_start_matches("linux-image-");
        match self.distribution {
            Distribution::Ubuntu => vec![named.to_owned(), format!("linux-modules-{release}")],
            Distribution::Debian if self.version.is_empty() => {
                ["binary", "base", "modules"].map(|part| format!("linux-{part}-{release}")).to_vec()
            }
            Distribution::Debian => vec![named.to_owned()],
        }
    }
}

/// Returns the numbers in a name, so that 6.1.0-9 sorts before 6.1.0-56.
fn numbers(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str) -> Line {
        *LINES.iter().find(|line| line.name == name).unwrap()
    }

    #[test]
    fn the_newest_plain_kernel_of_the_line_is_taken() {
        let names = "linux-image-6.1.0-9-amd64\nlinux-image-6.1.0-56-amd64\nlinux-image-6.1.0-57-cloud-amd64\n\
                     linux-image-6.1.0-58-amd64-dbg\nlinux-image-6.1.0-58-amd64-unsigned\nlinux-image-6.1.0-58-rt-amd64\n\
                     linux-image-6.12.117+deb12-amd64\nlinux-image-6.12-amd64\nlinux-image-amd64\n\
                     linux-image-6.1.0-59-arm64\n";
        let newest = |line: &str, arch| of(line).newest(names, arch);
        assert_eq!(newest("6.1", Arch::X86).as_deref(), Some("linux-image-6.1.0-56-amd64"));
        assert_eq!(newest("6.1", Arch::Arm).as_deref(), Some("linux-image-6.1.0-59-arm64"));
        assert_eq!(newest("6.12", Arch::X86).as_deref(), Some("linux-image-6.12.117+deb12-amd64"));
        assert_eq!(newest("sid", Arch::X86).as_deref(), Some("linux-image-6.12.117+deb12-amd64"));
        assert_eq!(newest("5.10", Arch::X86), None);
    }

    #[test]
    fn ubuntu_and_newer_debians_split_a_kernel_up() {
        let names =
            "linux-image-5.15.0-9-generic\nlinux-image-5.15.0-204-generic\nlinux-image-generic-5.15\n";
        let named = of("5.15").newest(names, Arch::X86).unwrap();
        assert_eq!(
            of("5.15").packages(&named),
            ["linux-image-5.15.0-204-generic", "linux-modules-5.15.0-204-generic"]
        );
        let parts = of("sid").packages("linux-image-7.2.13+deb14-amd64");
        assert!(parts.contains(&"linux-modules-7.2.13+deb14-amd64".to_owned()), "{parts:?}");
        assert_eq!(of("6.1").packages("linux-image-6.1.0-56-amd64"), ["linux-image-6.1.0-56-amd64"]);
    }
}
