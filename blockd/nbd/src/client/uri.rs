//! Addresses of exports, as the NBD project's document on URIs has them.

use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::str::FromStr;

use super::ClientError;

/// The port that IANA gave to NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerAddress {
    Unix(PathBuf),
    Tcp { host: String, port: u16 },
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// `nbd+unix:///NAME?socket=PATH` or `nbd://HOST:PORT/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    pub server: ServerAddress,
    /// The export; empty is the default one.
    pub export: String,
}

impl FromStr for Uri {
    type Err = ClientError;

    fn from_str(uri: &str) -> Result<Self, ClientError> {
        parse(uri).map_err(|why| ClientError::Uri { uri: uri.to_owned(), why })
    }
}

fn parse(uri: &str) -> Result<Uri, &'static str> {
    let shape = "must be nbd+unix:///NAME?socket=PATH or nbd://HOST:PORT/NAME";
    let (scheme, rest) = uri.split_once("://").ok_or(shape)?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, name) = rest.split_once('/').unwrap_or((rest, ""));
    let export = String::from_utf8(decode(name)?).map_err(|_| "the name must be UTF-8")?;
    let server = match scheme {
        "nbd+unix" => {
            if !authority.is_empty() {
                return Err("must have no host: three slashes come before the name");
            }
            let socket = query.split('&').find_map(|part| part.strip_prefix("socket="));
            let path = decode(socket.ok_or("must have socket=PATH after the question mark")?)?;
            ServerAddress::Unix(PathBuf::from(std::ffi::OsString::from_vec(path)))
        }
        "nbd" => tcp(authority)?,
        "nbds" | "nbds+unix" => return Err("must be without TLS"),
        _ => return Err(shape),
    };
    Ok(Uri { server, export })
}

fn tcp(authority: &str) -> Result<ServerAddress, &'static str> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("must have a ] after the host")?;
            (
                host,
                if port.is_empty() {
                    None
                } else {
                    Some(port.strip_prefix(':').ok_or("must have a port after the ]")?)
                },
            )
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port = match port {
        None => DEFAULT_PORT,
        Some(port) => port.parse().map_err(|_| "must have a port from 0 to 65535")?,
    };
    let host = if host.is_empty() { "localhost" } else { host };
    Ok(ServerAddress::Tcp { host: host.to_owned(), port })
}

fn decode(text: &str) -> Result<Vec<u8>, &'static str> {
    let bad = "must have two hexadecimal digits after each %";
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(|digit| char::from(digit).to_digit(16)).ok_or(bad);
        let value = digit()? * 16 + digit()?;
        decoded.push(u8::try_from(value).map_err(|_| bad)?);
    }
    Ok(decoded)
}

fn encode(bytes: &[u8]) -> String {
    let mut encoded = String::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                encoded.push(char::from(*byte));
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = encode(self.export.as_bytes());
        match &self.server {
            ServerAddress::Unix(path) => {
                write!(f, "nbd+unix:///{name}?socket={}", encode(path.as_os_str().as_bytes()))
            }
            server @ ServerAddress::Tcp { .. } => write!(f, "nbd://{server}/{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_address_are_read_and_written_again() {
        for text in [
            "nbd+unix:///default/web%201?socket=/run/blockd/nbd.sock",
            "nbd://example.org:10809/web",
            "nbd://[::1]:1/",
        ] {
            assert_eq!(text.parse::<Uri>().unwrap().to_string(), text);
        }
        let uri: Uri = "nbd://localhost".parse().unwrap();
        let server = ServerAddress::Tcp { host: "localhost".to_owned(), port: DEFAULT_PORT };
        assert_eq!(uri, Uri { server, export: String::new() });
    }

    #[test]
    fn an_invalid_address_is_refused_with_the_reason() {
        for (text, why) in [
            ("/dev/sda", "must be nbd+unix"),
            ("http://x/", "must be nbd+unix"),
            ("nbds://x/", "without TLS"),
            ("nbd+unix:///x", "socket=PATH"),
            ("nbd+unix://x/y?socket=/z", "no host"),
            ("nbd://x:99999/", "port"),
            ("nbd://x/%4", "two hexadecimal digits"),
        ] {
            let error = text.parse::<Uri>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(text), "{error}");
        }
    }
}
