//! Images of other programs, through qemu-img.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use blockd_media::error::Error;
use serde::Deserialize;

use super::image::Gated;
use super::progress::Progress;
use super::{STOP_WAIT, Stop, interrupted};

/// Where qemu finds a volume, and how long it waits for a daemon that has gone away.
#[derive(Clone, Debug)]
pub(crate) struct Export {
    /// The daemon's NBD socket.
    pub(crate) socket: String,
    /// The export's name.
    pub(crate) name: String,
    /// Seconds of patience.
    pub(crate) reconnect_seconds: u64,
}

#[derive(Debug, Deserialize)]
struct Info {
    #[serde(rename = "virtual-size")]
    virtual_size: u64,
}

impl Export {
    /// In qemu's language; a comma in a value is written twice.
    fn options(&self) -> String {
        let quoted = |text: &str| text.replace(',', ",,");
        format!(
            "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.export={},\
             file.reconnect-delay={}",
            quoted(&self.socket),
            quoted(&self.name),
            self.reconnect_seconds
        )
    }
}

/// An image that was let through, open.
pub(crate) struct Image<'a> {
    pub(crate) file: &'a File,
    pub(crate) path: &'a Path,
    pub(crate) gated: &'a Gated,
}

impl Image<'_> {
    /// The image as standard input of a qemu-img.
    fn stdin(&self) -> Result<Stdio, Error> {
        let file = self.file.try_clone();
        file.map(Stdio::from).map_err(|source| Error::file("open", self.path, source))
    }

    /// Starts qemu-img from a thread of its own, which is confined to the image and its parts.
    fn spawn(&self, command: &mut Command) -> Result<Child, Error> {
        let mut files = vec![OwnedFd::from(
            self.file.try_clone().map_err(|source| Error::file("open", self.path, source))?,
        )];
        let others = &self.gated.others;
        // Beside others, qemu finds the image by its path.
        for path in others.first().map(|_| self.path).into_iter().chain(others.iter().map(|p| &**p))
        {
            files.extend(File::open(path).ok().map(OwnedFd::from));
        }
        let program = program_folder();
        std::thread::scope(|scope| {
            let spawned = scope.spawn(|| {
                let files: Vec<_> = files.iter().map(OwnedFd::as_fd).collect();
                super::confine::this_thread(program.as_deref(), &files);
                command.spawn()
            });
            super::joined(spawned).map_err(not_started)
        })
    }
}

/// The folder of qemu-img, by the search path.
fn program_folder() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|folder| folder.join("qemu-img"));
    let found = found.filter_map(|program| program.canonicalize().ok()).next()?;
    found.parent().map(Path::to_owned)
}

/// The size of the disk in an image.
pub(crate) fn virtual_size(image: &Image<'_>) -> Result<u64, Error> {
    let mut command = Command::new("qemu-img");
    command.args(["info", "--output=json", "--"]).arg(image.gated.argument_of_top());
    command.stdin(image.stdin()?).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = image.spawn(&mut command)?.wait_with_output().map_err(not_started)?;
    if !output.status.success() {
        return Err(said(image.path, &output.stderr));
    }
    let info: Result<Info, _> = serde_json::from_slice(&output.stdout);
    info.map(|info| info.virtual_size).map_err(|error| Error::Unexpected {
        what: "qemu-img info".to_owned(),
        problem: error.to_string(),
    })
}

/// An image into a volume; `empty` when the volume holds nothing yet.
pub(crate) fn import(
    image: &Image<'_>,
    target: &Export,
    empty: bool,
    run: &Run<'_>,
) -> Result<(), Error> {
    let mut arguments = words(&["convert", "-n", "--target-image-opts"]);
    if empty {
        arguments.push("--target-is-zero".into());
    }
    arguments.extend(["--".into(), image.gated.argument().into(), target.options().into()]);
    let mut command = run.command(arguments);
    command.stdin(image.stdin()?);
    run.follow_to_end(image.spawn(&mut command)?, image.path)?;
    image.gated.check_unchanged(image.file, image.path)
}

/// A volume into a new image.
pub(crate) fn export(source: &Export, image: &Path, run: &Run<'_>) -> Result<(), Error> {
    let mut arguments = words(&["convert", "--image-opts", "-O", "qcow2", "--"]);
    arguments.extend([source.options().into(), image.as_os_str().to_owned()]);
    run.go(arguments, image)
}

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

/// How qemu-img is run.
pub(crate) struct Run<'a> {
    /// To end early.
    pub(crate) stop: &'a Stop,
    /// Shown in per cent of this.
    pub(crate) size_bytes: u64,
    /// Shows the progress.
    pub(crate) progress: &'a Progress,
}

impl Run<'_> {
    fn go(&self, arguments: Vec<OsString>, image: &Path) -> Result<(), Error> {
        let child = self.command(arguments).spawn().map_err(not_started)?;
        self.follow_to_end(child, image)
    }

    fn command(&self, mut arguments: Vec<OsString>) -> Command {
        if self.progress.is_shown() {
            arguments.insert(1, "-p".into());
        }
        let mut command = Command::new("qemu-img");
        command.args(arguments).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn follow_to_end(&self, mut child: Child, image: &Path) -> Result<(), Error> {
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        std::thread::scope(|scope| {
            let shown = scope.spawn(|| self.follow(stdout));
            let complaint = scope.spawn(move || {
                let mut text = Vec::new();
                stderr.map(|mut stderr| stderr.read_to_end(&mut text));
                text
            });
            let status = self.wait(&mut child)?;
            super::joined(shown);
            let complaint = super::joined(complaint);
            if status { Ok(()) } else { Err(said(image, &complaint)) }
        })
    }

    /// Whether it succeeded. Stopped, it is ended.
    fn wait(&self, child: &mut Child) -> Result<bool, Error> {
        let failed = |source| Error::io("waiting for qemu-img", source);
        loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok(status.success());
            }
            if self.stop.check().is_err() {
                child.kill().and_then(|()| child.wait()).map_err(failed)?;
                return Err(interrupted());
            }
            std::thread::sleep(STOP_WAIT);
        }
    }

    /// Reads `    (12.34/100%)` and a carriage return, again and again.
    fn follow(&self, stdout: Option<ChildStdout>) {
        let Some(mut stdout) = stdout else { return };
        let mut buffer = [0; 256];
        let mut line = String::new();
        while let Ok(count) = stdout.read(&mut buffer) {
            if count == 0 {
                return;
            }
            line.push_str(&String::from_utf8_lossy(&buffer[..count]));
            while let Some((done, rest)) = line.split_once('\r') {
                if let Some(share) = per_ten_thousand(done) {
                    let bytes = u128::from(self.size_bytes) * u128::from(share) / 10_000;
                    self.progress.set(u64::try_from(bytes).unwrap_or(u64::MAX));
                }
                line = rest.to_owned();
            }
        }
    }
}

fn per_ten_thousand(line: &str) -> Option<u32> {
    let (whole, rest) = line.trim().strip_prefix('(')?.split_once('.')?;
    let (hundredths, _) = rest.split_once('/')?;
    let share = whole.parse::<u32>().ok()? * 100 + hundredths.parse::<u32>().ok()?;
    Some(share.min(10_000))
}

fn not_started(source: io::Error) -> Error {
    if source.kind() == io::ErrorKind::NotFound {
        return Error::NotFound {
            what: "program",
            name: "qemu-img (all formats but raw need it: install the package qemu-utils)"
                .to_owned(),
        };
    }
    Error::io("starting qemu-img", source)
}

fn said(image: &Path, stderr: &[u8]) -> Error {
    let text = String::from_utf8_lossy(stderr);
    let line = text.lines().next().unwrap_or("failed and said nothing");
    let line = line.strip_prefix("qemu-img: ").unwrap_or(line);
    Error::io(format!("qemu-img, {}", image.display()), io::Error::other(line.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_read_from_qemu_img() {
        assert_eq!(per_ten_thousand("    (12.34/100%)"), Some(1234));
        assert_eq!(per_ten_thousand("    (100.00/100%)"), Some(10_000));
        assert_eq!(per_ten_thousand("anything else"), None);
    }

    #[test]
    fn commas_in_names_do_not_end_an_option() {
        let export = Export {
            socket: "/run/a,b".to_owned(),
            name: "c,file.driver=file".to_owned(),
            reconnect_seconds: 60,
        };
        let options = export.options();
        assert!(options.contains("path=/run/a,,b,file.export=c,,file.driver=file,"), "{options}");
    }
}
