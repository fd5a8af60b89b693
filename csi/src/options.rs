//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use blockd_csi_base::options::{DEFAULT_DRIVER, LogFormat, check_driver};
use clap::{Parser, ValueEnum};

use crate::error::Error;

/// Bytes of a node's id: it is the value of a topology, and those are labels.
const MAX_NODE: usize = 63;

/// Bytes of a socket's path, with the end of the string.
const MAX_SOCKET: usize = 107;

/// The CSI plugin of blockd.
#[derive(Clone, Parser, Debug)]
#[command(
    name = "blockd-csi",
    version = env!("BLOCKD_VERSION"),
    about,
    max_term_width = 100,
    after_help = "`blockd-csi extender` is an optional extender of the scheduler, and `blockd-csi record` \
                  writes the calls of a cluster to a file. `blockd-csi orphans` lists \
                  volumes without a PersistentVolume, `blockd-csi move` moves a volume to another \
                  node, and `blockd-csi lost-node` lists what a node that is gone holds: see their \
                  --help."
)]
pub struct Options {
    /// Unix socket to serve on
    #[arg(
        long,
        env = "CSI_ENDPOINT",
        value_name = "unix://PATH",
        default_value = "unix:///run/blockd-csi/csi.sock"
    )]
    pub endpoint: String,

    /// Number of a group that may call the plugin too, as sidecars have it that do not run as root.
    /// Without it, only the plugin's own user may call it
    #[arg(long, value_name = "GID")]
    pub endpoint_group: Option<u32>,

    /// Name of the driver, as in the CSIDriver object; several can run side by side
    #[arg(long, value_name = "NAME", default_value = DEFAULT_DRIVER)]
    pub driver_name: String,

    /// Control socket of the daemon
    #[arg(long, value_name = "PATH", default_value = "/run/blockd/control.sock")]
    pub blockd_socket: PathBuf,

    /// Name of this node in the cluster
    #[arg(long, env = "NODE_ID", value_name = "NAME")]
    pub node_id: String,

    /// Services to offer; Identity is always there
    #[arg(long, value_enum, value_delimiter = ',', default_value = "controller,node")]
    pub services: Vec<Service>,

    /// File with device classes and smallest sizes
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Folder for records of staged volumes [default: plugins/DRIVER-NAME/state below the kubelet's
    /// folder]
    #[arg(long, value_name = "FOLDER")]
    pub state_dir: Option<PathBuf>,

    /// The kubelet's folder: paths outside are refused
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/kubelet")]
    pub kubelet_dir: PathBuf,

    /// Address to serve metrics on over HTTP; nothing is served without
    #[arg(long, value_name = "IP:PORT")]
    pub metrics_address: Option<SocketAddr>,

    /// Address to serve only /healthz on, over HTTP: for liveness probes that reach the pod by its
    /// network, while metrics stay on another address
    #[arg(long, value_name = "IP:PORT")]
    pub health_address: Option<SocketAddr>,

    /// Publish volumes of mode SINGLE_NODE_WRITER at one path only, as the specification has it
    #[arg(long)]
    pub strict_single_node_writer: bool,

    /// Grow volumes on their own node, in NodeExpandVolume, and do not offer
    /// ControllerExpandVolume: csi-resizer has no notion of nodes
    #[arg(long)]
    pub expand_on_node: bool,

    /// Form of the log
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// A service that can be left out.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub enum Service {
    /// Makes, lists and changes volumes.
    Controller,
    /// Makes volumes usable on this host.
    Node,
}

impl Options {
    /// Checks rules that clap cannot.
    ///
    /// # Errors
    /// A value is out of range.
    pub fn check(&self) -> Result<(), Error> {
        check_driver(&self.driver_name)?;
        check_node("node-id", &self.node_id)?;
        self.socket().map(|_| ())?;
        for (field, path) in [("kubelet-dir", &self.kubelet_dir), ("state-dir", &self.state_dir())]
        {
            if !path.is_absolute() {
                return Err(Error::invalid(field, path.display(), "an absolute path"));
            }
        }
        Ok(())
    }

    /// The path of the endpoint.
    ///
    /// # Errors
    /// The text is not a path of a Unix socket.
    pub fn socket(&self) -> Result<PathBuf, Error> {
        let refused = || {
            let allowed = format!("unix:// and an absolute path of at most {MAX_SOCKET} bytes");
            Error::invalid("endpoint", &self.endpoint, allowed)
        };
        // The sidecars also take `unix:/path` and the path alone.
        let path = self.endpoint.strip_prefix("unix://");
        let path = path.or_else(|| self.endpoint.strip_prefix("unix:")).unwrap_or(&self.endpoint);
        if !path.starts_with('/') || path.len() > MAX_SOCKET || path.contains('\0') {
            return Err(refused());
        }
        Ok(PathBuf::from(path))
    }

    /// The folder of the records of staged volumes.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.state_dir.clone().unwrap_or_else(|| {
            self.kubelet_dir.join("plugins").join(&self.driver_name).join("state")
        })
    }
}

/// Refuses a name that no node has. `field` is what the error names.
pub(crate) fn check_node(field: &str, name: &str) -> Result<(), Error> {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let outer = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let fits = name.len() <= MAX_NODE && name.chars().all(inner);
    if fits && outer(name.chars().next()) && outer(name.chars().last()) {
        return Ok(());
    }
    let allowed = format!(
        "1 to {MAX_NODE} letters, digits, dashes, dots and underscores, and begin and end with a \
         letter or digit: it is the value of a label"
    );
    Err(Error::invalid(field, name, allowed))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parse(words: &[&str]) -> Options {
        Options::try_parse_from([&["blockd-csi", "--node-id", "n1"], words].concat()).unwrap()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
        let options = parse(&[]);
        options.check().unwrap();
        assert_eq!(options.services, [Service::Controller, Service::Node]);
        assert_eq!(parse(&["--services", "node"]).services, [Service::Node]);
    }

    #[test]
    fn all_paths_follow_the_name_of_the_driver() {
        let options = parse(&["--driver-name", "fast.example.com", "--kubelet-dir", "/k"]);
        let expected = PathBuf::from("/k/plugins/fast.example.com/state");
        assert_eq!(options.state_dir(), expected);
        let options = parse(&["--state-dir", "/s"]);
        assert_eq!(options.state_dir(), PathBuf::from("/s"));
    }

    #[test]
    fn endpoints_are_paths_of_unix_sockets() {
        for endpoint in ["unix:///run/csi.sock", "unix:/run/csi.sock", "/run/csi.sock"] {
            let options = parse(&["--endpoint", endpoint]);
            assert_eq!(options.socket().unwrap(), PathBuf::from("/run/csi.sock"), "{endpoint}");
        }
        let long = format!("unix:///{}", "a".repeat(107));
        for endpoint in ["", "tcp://127.0.0.1:1", "unix://run/csi.sock", "csi.sock", &long] {
            let error = parse(&["--endpoint", endpoint]).check().unwrap_err();
            assert!(error.to_string().starts_with("endpoint is "), "{error}");
        }
    }

    #[test]
    fn names_of_drivers_and_nodes_are_checked() {
        let long = "a".repeat(64);
        for name in ["", "-a", "a-", ".a", "a.", "a..b", "a_b", "a/b", "ä", &long] {
            let options = Options { driver_name: name.to_owned(), ..parse(&[]) };
            let error = options.check().unwrap_err();
            assert!(error.to_string().starts_with("driver-name is "), "{error}");
        }
        for name in ["", "-a", "a-", "a/b", "a b", "ä", &long] {
            let options = Options { node_id: name.to_owned(), ..parse(&[]) };
            let error = options.check().unwrap_err();
            assert!(error.to_string().starts_with("node-id is "), "{error}");
        }
        let options = Options { node_id: "ip-10-0-0-1.eu-1.internal".to_owned(), ..parse(&[]) };
        options.check().unwrap();
    }

    #[test]
    fn a_node_needs_its_name() {
        if std::env::var_os("NODE_ID").is_none() {
            assert!(Options::try_parse_from(["blockd-csi"]).is_err());
        }
    }
}
