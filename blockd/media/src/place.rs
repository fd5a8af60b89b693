//! Where files are, by the user that runs the daemon.

use std::env;
use std::path::PathBuf;

/// Folders that a user's daemon uses unless it is configured otherwise.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Places {
    /// Sockets, locks, delta rings.
    pub runtime_dir: PathBuf,
    /// The folder of the daemon's state.
    pub state_dir: PathBuf,
    /// Where the configuration is looked for.
    pub config_dir: PathBuf,
    /// How many workers there are without a number in the configuration.
    pub workers: usize,
}

impl Places {
    /// The places of the user of this process.
    #[must_use]
    pub fn of_process() -> Self {
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        let places =
            if nix::unistd::geteuid().is_root() { Self::of_root() } else { Self::of_user() };
        Self { workers, ..places }
    }

    /// The places of root.
    #[must_use]
    pub fn of_root() -> Self {
        Self {
            runtime_dir: PathBuf::from("/run/blockd"),
            state_dir: PathBuf::from("/var/lib/blockd"),
            config_dir: PathBuf::from("/etc/blockd"),
            workers: 1,
        }
    }

    /// The places of any other user, after the XDG base directory specification.
    fn of_user() -> Self {
        let absolute =
            |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = absolute("HOME").unwrap_or_else(env::temp_dir);
        let user = nix::unistd::geteuid();
        let runtime =
            absolute("XDG_RUNTIME_DIR").unwrap_or_else(|| format!("/run/user/{user}").into());
        let state = absolute("XDG_STATE_HOME").unwrap_or_else(|| base.join(".local/state"));
        let config = absolute("XDG_CONFIG_HOME").unwrap_or_else(|| base.join(".config"));
        Self {
            runtime_dir: runtime.join("blockd"),
            state_dir: state.join("blockd"),
            config_dir: config.join("blockd"),
            workers: 1,
        }
    }

    /// The configuration file at its usual place.
    #[must_use]
    pub fn config_file(&self) -> PathBuf {
        self.config_dir.join("blockd.toml")
    }
}

/// Where this user's daemon serves the control API, unless it is configured otherwise. For clients.
#[must_use]
pub fn default_socket() -> PathBuf {
    Places::of_process().runtime_dir.join(CONTROL_SOCKET)
}

/// The control socket's name in the runtime folder.
pub const CONTROL_SOCKET: &str = "control.sock";

/// The NBD socket's name in the runtime folder.
pub const NBD_SOCKET: &str = "nbd.sock";
