//! The files and devices that a configuration names, as they are now, and settings that are
//! dangerous. Nothing is made, and nothing is opened for writing.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use blockd_control::config::{DeviceConfig, DeviceKind, PoolConfig};
use blockd_media::error::{Error, shown};
use blockd_serve::nbd::tls::{TlsFiles, acceptor};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::unistd::{AccessFlags, access};

use super::{Config, ListenAddress, TlsConfig, TlsUse};

/// The findings about a configuration whose values are right.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// The daemon, or a pool, would not start.
    pub(super) errors: Vec<Error>,
    /// Settings and places with which the daemon starts, and which an operator should check.
    pub(super) warnings: Vec<String>,
}

impl Findings {
    fn error(&mut self, field: &str, path: &Path, allowed: impl std::fmt::Display) {
        self.errors.push(Error::invalid(field, path.display(), allowed));
    }

    fn warn(&mut self, text: String) {
        self.warnings.push(text);
    }
}

/// Checks the places and settings of a configuration.
pub(super) fn check(config: &Config) -> Findings {
    let mut findings = Findings::default();
    folders(config, &mut findings);
    if let Some(tls) = &config.nbd.tls {
        certificates(tls, &mut findings);
    }
    for pool in &config.pools {
        devices(pool, config, &mut findings);
        dangers_of_pool(pool, &mut findings);
    }
    same_devices(config, &mut findings);
    dangers_of_listeners(config, &mut findings);
    findings
}

/// The folder that is there, of a path and those above it.
fn nearest(path: &Path) -> Option<&Path> {
    path.ancestors().find(|path| path.exists())
}

fn is_writable(folder: &Path) -> bool {
    access(folder, AccessFlags::W_OK | AccessFlags::X_OK).is_ok()
}

fn folders(config: &Config, findings: &mut Findings) {
    for (name, folder) in [("runtime_dir", &config.runtime_dir), ("state_dir", &config.state_dir)] {
        match nearest(folder) {
            Some(found) if !found.is_dir() => {
                findings.error(name, folder, format!("a folder: {} is none", found.display()));
            }
            Some(found) if !is_writable(found) => findings.warn(format!(
                "{name} is {}: this user may not write to {}",
                folder.display(),
                found.display()
            )),
            _ => {}
        }
    }
    let runtime = &config.runtime_dir;
    if runtime.is_dir() && statfs(runtime).is_ok_and(|found| found.filesystem_type() != TMPFS_MAGIC)
    {
        let allowed = "on tmpfs: what is in it must not outlive the host's memory";
        findings.error("runtime_dir", runtime, allowed);
    }
    let listeners = config.nbd.listeners.iter().filter_map(|one| match &one.address {
        ListenAddress::Unix { path, .. } => Some(("nbd.listener.unix", path)),
        ListenAddress::Tcp(_) => None,
    });
    let extends = config.pools.iter().filter_map(|pool| pool.extend_socket.as_ref());
    let extends = extends.map(|path| ("pool.extend.socket", path));
    for (name, path) in
        [("control_socket", &config.control_socket)].into_iter().chain(listeners).chain(extends)
    {
        if fs::symlink_metadata(path).is_ok_and(|found| !found.file_type().is_socket()) {
            findings.error(name, path, "a path with nothing at it, or a socket");
        } else if let Some(folder) = path.parent().filter(|folder| !is_made(folder, config)) {
            findings.warn(format!(
                "{name} is {}: {} is not there",
                path.display(),
                folder.display()
            ));
        }
    }
}

/// Whether a folder is there, or will be made by the daemon.
fn is_made(folder: &Path, config: &Config) -> bool {
    folder.is_dir() || [&config.runtime_dir, &config.state_dir].contains(&&folder.to_path_buf())
}

fn certificates(tls: &TlsConfig, findings: &mut Findings) {
    let files = TlsFiles {
        certificate: tls.certificate.clone(),
        key: tls.key.clone(),
        client_ca: tls.client_ca.clone(),
    };
    if let Err(error) = acceptor(&files) {
        let problem = super::with_causes(&error);
        findings.errors.push(Error::Config { place: "nbd.tls".to_owned(), problem });
    }
    let mode = fs::metadata(&tls.key).map(|found| found.permissions().mode() & 0o7777);
    if let Ok(mode) = mode
        && mode & 0o007 != 0
    {
        let key = tls.key.display();
        findings.warn(format!("nbd.tls.key is {key}: all users may use it (mode {mode:04o})"));
    }
}

fn devices(pool: &PoolConfig, config: &Config, findings: &mut Findings) {
    let name = format!("path of pool {}", shown(&pool.name));
    for device in pool.devices.iter().filter(|device| is_path(device)) {
        let path = &device.path;
        let Ok(found) = fs::metadata(path) else {
            let folder = path.parent().filter(|folder| !is_made(folder, config));
            if let Some(folder) = folder {
                let (path, folder) = (path.display(), folder.display());
                findings.warn(format!("{name} is {path}: {folder} is not there"));
            }
            continue;
        };
        let kind = found.file_type();
        if kind.is_dir() {
            findings.error(&name, path, "a file or a device: it is a folder");
        } else if device.kind == DeviceKind::Disk && !kind.is_block_device() {
            findings.error(&name, path, "a block device, as kind is disk");
        } else if device.kind == DeviceKind::File && !kind.is_file() {
            findings.error(&name, path, "a file, as kind is file");
        } else if access(path, AccessFlags::R_OK | AccessFlags::W_OK).is_err() {
            findings.warn(format!("{name} is {}: this user may not write to it", path.display()));
        }
    }
}

/// Whether a device has a path in the file system.
fn is_path(device: &DeviceConfig) -> bool {
    device.kind != DeviceKind::Memory && device.path.is_absolute()
}

/// Two names of one file or disk: links, or other nodes of a device.
fn same_devices(config: &Config, findings: &mut Findings) {
    let identity = |found: &Metadata| match found.file_type().is_block_device() {
        true => (0, found.rdev()),
        false => (found.dev(), found.ino()),
    };
    let mut seen: BTreeMap<(u64, u64), (&str, &PathBuf)> = BTreeMap::new();
    for pool in &config.pools {
        for device in pool.devices.iter().chain(&pool.spares).filter(|device| is_path(device)) {
            let Ok(found) = fs::metadata(&device.path) else { continue };
            let place = (pool.name.as_str(), &device.path);
            if let Some((other, path)) = seen.insert(identity(&found), place) {
                let (other, path) = (shown(other), path.display());
                let allowed = format!("another device: it is {path} of pool {other} as well");
                findings.error(
                    &format!("path of pool {}", shown(&pool.name)),
                    &device.path,
                    allowed,
                );
            }
        }
    }
}

fn dangers_of_pool(pool: &PoolConfig, findings: &mut Findings) {
    let name = shown(&pool.name);
    let mut warn = |text: &str| findings.warn(format!("pool {name}: {text}"));
    if pool.accept_loss {
        warn("accept_loss is on: it opens without its delta ring, and may lack answered writes");
    }
    if pool.devices.iter().any(|device| device.kind == DeviceKind::Memory) {
        warn("it is in memory: its volumes are lost when the daemon ends");
    }
    if pool.space.marks.is_none() {
        warn("space.low and space.very_low are off: nothing warns before it is full");
    }
    let trusts = |device: &DeviceConfig| match device.kind {
        DeviceKind::Pmem(options) => options.power_safe,
        _ => false,
    };
    if pool.devices.iter().any(trusts) {
        warn("persistence is power-safe: without such a platform, a power failure loses data");
    }
}

fn dangers_of_listeners(config: &Config, findings: &mut Findings) {
    for listener in &config.nbd.listeners {
        match &listener.address {
            ListenAddress::Tcp(address) if !address.ip().is_loopback() => {
                if listener.tls != TlsUse::Required {
                    findings.warn(format!(
                        "nbd.listener.tcp is {address} and tls is not required: each host that \
                         reaches it can read and write all attached volumes"
                    ));
                }
            }
            ListenAddress::Unix { path, mode } if mode & 0o007 != 0 => findings.warn(format!(
                "nbd.listener.mode is {mode:04o}: all users can read and write all attached \
                 volumes through {}",
                path.display()
            )),
            ListenAddress::Tcp(_) | ListenAddress::Unix { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use blockd_media::place::Places;

    use super::*;

    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// A folder on tmpfs, and the findings about a text in which `DIR` stands for it.
    fn folder(name: &str) -> Folder {
        let path = format!("/dev/shm/blockd-check-{}-{name}", std::process::id());
        fs::create_dir_all(&path).unwrap();
        Folder(path.into())
    }

    fn of(folder: &Folder, text: &str) -> (Vec<String>, Vec<String>) {
        let dir = folder.0.to_str().unwrap();
        let start = format!("runtime_dir = \"{dir}\"\nstate_dir = \"{dir}\"\n");
        let text = format!("{start}{}", text.replace("DIR", dir));
        let findings = check(&Config::parse(&text, None, &Places::of_root()).unwrap());
        (findings.errors.iter().map(ToString::to_string).collect(), findings.warnings)
    }

    #[test]
    fn nothing_is_said_of_a_plain_configuration() {
        let folder = folder("plain");
        let pool = "[[pool]]\nname = \"default\"\npath = \"DIR/pool\"\nsize = \"1G\"\n";
        assert_eq!(of(&folder, pool), (Vec::new(), Vec::new()));
    }

    #[test]
    fn files_that_do_not_fit_are_errors_and_those_that_are_missing_are_warnings() {
        let folder = folder("files");
        fs::write(folder.0.join("file"), "x").unwrap();
        fs::write(folder.0.join("other"), "x").unwrap();
        fs::hard_link(folder.0.join("file"), folder.0.join("link")).unwrap();
        let pool = |name: &str, more: &str| format!("[[pool]]\nname = \"{name}\"\n{more}\n");
        let text = [
            "control_socket = \"DIR/other\"\ndefault_pool = \"a\"\n".to_owned(),
            pool("a", "path = \"DIR\""),
            pool("b", "path = \"DIR/file\"\nkind = \"disk\""),
            pool("c", "path = \"DIR/link\""),
            pool("d", "path = \"DIR/no/such\""),
        ];
        let (errors, warnings) = of(&folder, &text.concat());
        let parts = ["control_socket", "pool a", "pool b", "pool c"];
        assert_eq!(errors.len(), parts.len(), "{errors:#?}");
        for (error, part) in errors.iter().zip(parts) {
            assert!(error.contains(part), "{error}");
        }
        assert!(matches!(warnings.as_slice(), [one] if one.contains("no is not there")));
    }

    #[test]
    fn certificates_are_read() {
        let folder = folder("tls");
        let tls = "[nbd.tls]\ncertificate = \"DIR/c.pem\"\nkey = \"DIR/k.pem\"\n";
        let (errors, _) = of(&folder, tls);
        assert!(matches!(errors.as_slice(), [one] if one.contains("c.pem")), "{errors:?}");
        fs::write(folder.0.join("c.pem"), "no certificate").unwrap();
        let (errors, _) = of(&folder, tls);
        assert!(errors.iter().any(|error| error.starts_with("nbd.tls: ")), "{errors:?}");
    }

    #[test]
    fn dangerous_settings_are_named() {
        let folder = folder("dangers");
        let text = "[[pool]]\nname = \"default\"\nkind = \"memory\"\nsize = \"64M\"\n\
                    accept_loss = true\n[pool.space]\nlow = \"off\"\nvery_low = \"off\"\n\
                    [[nbd.listener]]\nunix = \"DIR/n\"\nmode = \"0666\"\n\
                    [[nbd.listener]]\ntcp = \"0.0.0.0:10809\"\n";
        let (errors, warnings) = of(&folder, text);
        assert!(errors.is_empty(), "{errors:?}");
        for part in ["accept_loss", "in memory", "very_low are off", "0666", "0.0.0.0:10809"] {
            assert!(warnings.iter().any(|one| one.contains(part)), "{part}: {warnings:#?}");
        }
        assert_eq!(warnings.len(), 5, "{warnings:#?}");
    }
}
