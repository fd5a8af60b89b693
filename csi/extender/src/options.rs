//! The extender's command line.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use blockd_csi_base::options::{DEFAULT_DRIVER, LogFormat, check_driver};
use clap::Parser;

use super::error::Error;
use super::score::{Divisor, Mode, Rule};

/// Where the kubelet puts the files of a pod's service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// An extender of the Kubernetes scheduler. Storage capacity tracking does the same without it
/// wherever it can be used
#[derive(Clone, Parser, Debug)]
#[command(name = "blockd-csi extender", version, max_term_width = 100)]
pub struct Options {
    /// Address to serve on
    #[arg(long, value_name = "IP:PORT", default_value = "0.0.0.0:9811")]
    pub listen: SocketAddr,

    /// Serve HTTPS with this certificate and its chain, a PEM file; any client may come
    #[arg(long, value_name = "FILE")]
    pub tls_certificate: Option<PathBuf>,

    /// The private key to it, a PEM file
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// Name of the driver whose volumes are counted
    #[arg(long, value_name = "NAME", default_value = DEFAULT_DRIVER)]
    pub driver_name: String,

    /// The plugin's configuration: its default class and default size are meant where a volume
    /// names none
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// How nodes are scored
    #[arg(long, value_enum, default_value_t = Mode::Bytes)]
    pub mode: Mode,

    /// Divides the capacity of a class in the legacy modes
    #[arg(long = "divisor", value_name = "CLASS=NUMBER")]
    pub divisors: Vec<String>,

    /// Divides the capacity of all other classes in the legacy modes
    #[arg(long, value_name = "NUMBER", default_value = "1")]
    pub default_divisor: String,

    /// Port at which the plugins of nodes serve metrics, for nodes without annotations
    #[arg(long, value_name = "PORT", default_value_t = 9810)]
    pub metrics_port: u16,

    /// The Kubernetes API server, from which the claims of pods and their storage classes are read;
    /// in a pod, that of the cluster
    #[arg(long, value_name = "https://HOST:PORT")]
    pub api_server: Option<String>,

    /// Folder with the token of a service account that may read claims and storage classes, and
    /// with ca.crt, the authority of the API server
    #[arg(long, value_name = "FOLDER", default_value = SERVICE_ACCOUNT)]
    pub service_account: PathBuf,

    /// Form of the log
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

impl Options {
    /// How nodes are scored.
    ///
    /// # Errors
    /// A divisor is no number above 0, is given twice, or means nothing in this mode; or the
    /// driver's name is none.
    pub fn rule(&self) -> Result<Rule, Error> {
        check_driver(&self.driver_name)?;
        let default = Divisor::parse("default-divisor", &self.default_divisor)?;
        let mut divisors = BTreeMap::new();
        for text in &self.divisors {
            let refused = || Error::invalid("divisor", text, "a class, = and a number, once each");
            let (class, number) = text.split_once('=').ok_or_else(refused)?;
            let divisor = Divisor::parse(&format!("divisor of class {class}"), number)?;
            if class.is_empty() || divisors.insert(class.to_owned(), divisor).is_some() {
                return Err(refused());
            }
        }
        let divides = !divisors.is_empty() || default != Divisor::ONE;
        if divides && self.mode == Mode::Bytes {
            let allowed = "left out in mode bytes, which compares nodes with each other";
            return Err(Error::invalid("divisor", "set", allowed));
        }
        Ok(Rule { mode: self.mode, default, divisors })
    }

    /// Host and port of the API server: those of the option, else those of the pod's cluster.
    ///
    /// # Errors
    /// The address is none, or there is neither.
    pub fn api_server(&self) -> Result<(String, u16), Error> {
        let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let cluster = || {
            let host = variable("KUBERNETES_SERVICE_HOST")?;
            Some((host, variable("KUBERNETES_SERVICE_PORT")?.parse().ok()?))
        };
        match &self.api_server {
            Some(text) => {
                address(text).ok_or_else(|| Error::invalid("api-server", text, "https://HOST:PORT"))
            }
            None => cluster().ok_or_else(|| {
                let allowed =
                    "given outside of a cluster, where KUBERNETES_SERVICE_HOST is not set";
                Error::invalid("api-server", "not set", allowed)
            }),
        }
    }

    /// The files of the certificate and its key.
    ///
    /// # Errors
    /// One is given without the other.
    pub fn tls_files(&self) -> Result<Option<(&Path, &Path)>, Error> {
        match (&self.tls_certificate, &self.tls_key) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => Ok(Some((certificate, key))),
            (None, _) => Err(Error::Missing { field: "tls-certificate" }),
            (_, None) => Err(Error::Missing { field: "tls-key" }),
        }
    }
}

/// Host and port of an address that has no more than that.
fn address(text: &str) -> Option<(String, u16)> {
    let uri: hyper::Uri = text.parse().ok()?;
    let is_plain = uri.scheme_str() == Some("https") && uri.path() == "/" && uri.query().is_none();
    let authority = uri.authority().filter(|one| is_plain && !one.as_str().contains('@'))?;
    let host = authority.host();
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    Some((host.to_owned(), authority.port_u16().unwrap_or(443)))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parse(words: &[&str]) -> Options {
        Options::try_parse_from([&["blockd-csi extender"], words].concat()).unwrap()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
        let rule = parse(&[]).rule().unwrap();
        assert_eq!((rule.mode, rule.default), (Mode::Bytes, Divisor::ONE));
        assert_eq!(parse(&[]).tls_files().unwrap(), None);
    }

    #[test]
    fn the_api_server_is_an_address_of_https_and_nothing_else() {
        let read = |text: &str| parse(&["--api-server", text]).api_server();
        for (text, host, port) in [
            ("https://10.96.0.1:6443", "10.96.0.1", 6443),
            ("https://kubernetes.default.svc", "kubernetes.default.svc", 443),
            ("https://[fd00::1]:443/", "fd00::1", 443),
        ] {
            assert_eq!(read(text).unwrap(), (host.to_owned(), port));
        }
        for text in [
            "",
            "10.96.0.1:443",
            "http://a:1",
            "https://",
            "https://a/b",
            "https://u:p@a",
            "https://a?b",
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.starts_with("api-server is "), "{error}");
        }
    }

    #[test]
    fn invalid_fields_are_refused_by_name() {
        let cases: [(&[&str], &str); 7] = [
            (&["--divisor", "thin=2"], "divisor is set: must be left out in mode bytes"),
            (&["--mode", "legacy", "--divisor", "thin"], "divisor is thin"),
            (&["--mode", "legacy", "--divisor", "=2"], "divisor is =2"),
            (&["--mode", "legacy", "--divisor", "a=0"], "divisor of class a is 0"),
            (&["--mode", "legacy", "--divisor", "a=1", "--divisor", "a=2"], "divisor is a=2"),
            (&["--mode", "legacy", "--default-divisor", "one"], "default-divisor is one"),
            (&["--driver-name", "a_b"], "driver-name is a_b"),
        ];
        for (words, said) in cases {
            let error = parse(words).rule().unwrap_err().to_string();
            assert!(error.starts_with(said), "{words:?}: {error}");
        }
        for (words, said) in [
            (["--tls-key", "k"], "tls-certificate is missing"),
            (["--tls-certificate", "c"], "tls-key is missing"),
        ] {
            assert_eq!(parse(&words).tls_files().unwrap_err().to_string(), said);
        }
    }
}
