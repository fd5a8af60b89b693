//! Daemons of this machine, without virtual machines, that share cells in a folder.

use std::path::Path;

use anyhow::{Context, Result};
use blockd_testkit::daemon::{Daemon, Home, Settings};
use blockd_testkit::tools;

/// Starts the daemon of a host, which joins the volume group `vg` in that folder. Its own files lie
/// beside.
pub(super) fn daemon(folder: &Path, host: usize) -> Result<Daemon> {
    let port = tools::free_port()?;
    let tables = format!(
        "[ublk]\nenabled = \"off\"\n\
         [node]\nid = \"{host:08x}-0000-4000-8000-000000000000\"\n\
         [hosts]\nlisten = \"127.0.0.1:{port}\"\n"
    );
    let home = Home::Below(folder.to_path_buf());
    let settings = Settings { home, pool_size: 64 << 20, tables, ..Settings::default() };
    let mut daemon = Daemon::new("host", &settings)?;
    daemon.start()?;
    let (folder, host) = (folder.to_str().context("the folder's name")?, host.to_string());
    daemon.cli(&["vg", "add", "--folder", folder, "--host", &host, "vg"])?;
    Ok(daemon)
}
