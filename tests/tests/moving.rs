//! A volume that moves to another host under a client that compares all that it reads.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;

use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::folder::Folder;
use blockd_testkit::tools::{self, shell};

const SIZE: u64 = 64 << 20;
/// Bytes in which it is seen that fio writes.
const PART: usize = 1 << 20;

/// The exit code of a move that waits for the programs that use the volume.
const IN_USE: i32 = 7;

/// The longest that fio may take to begin, and a move once nothing uses the volume.
const LIMIT: Duration = Duration::from_secs(60);

/// A receiver that ends with its test, and its address.
struct Receiver(Child, String);

impl Receiver {
    fn start(daemon: &Daemon) -> Self {
        let mut command = daemon.command(&["receive", "--listen", "127.0.0.1:0"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim_end().strip_prefix("blockd: waiting for senders at ");
        let target = format!("tcp://{}", address.unwrap_or_else(|| panic!("{line}")));
        Self(child, target)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serving(name: &str) -> Daemon {
    let mut daemon = Daemon::new(name, &Settings::default()).unwrap();
    daemon.start().unwrap();
    daemon
}

/// fio on the volume, each of whose blocks of 16 KiB has a checksum.
fn fio(daemon: &Daemon, folder: &Folder, arguments: &str) -> anyhow::Result<String> {
    let (folder, uri) = (folder.path().display(), daemon.uri("data"));
    shell(&format!(
        "cd {folder} && fio --name=v --ioengine=nbd --uri='{uri}' --bs=16k --size={SIZE} --iodepth=16 \
         --verify=crc32c --verify_fatal=1 {arguments}"
    ))
}

fn content(daemon: &Daemon) -> Vec<u8> {
    let output = daemon.command(&["export", "data", "-"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn a_writer_that_verifies_meets_no_error_until_its_volume_has_moved() {
    let (here, there) = (serving("move-here"), serving("move-there"));
    let folder = Folder::new("move-fio").unwrap();
    here.add("data", SIZE).unwrap();
    fio(&here, &folder, "--rw=write --do_verify=0").unwrap();
    let receiver = Receiver::start(&there);
    // fio connects for the size first, then to write: meanwhile nothing would use the volume.
    let mut held = here.connect("data").unwrap();
    let before = held.read(0, PART).unwrap();
    let (rounds, pause) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let line = "--rw=randwrite --verify_backlog=64 --rate=,16m --time_based --runtime=8s";
            fio(&here, &folder, line).map(|_| Clock::start())
        });
        let written = || (held.read(0, PART).unwrap() != before).then_some(());
        tools::wait_until("fio to write", LIMIT, written).unwrap();
        drop(held);
        let mut rounds = 0;
        loop {
            let output = here.cli_output(&["move", "data", &receiver.1]).unwrap();
            match output.status.code() {
                Some(0) => break,
                Some(IN_USE) => rounds += 1,
                code => panic!("{code:?}: {}", String::from_utf8_lossy(&output.stderr)),
            }
        }
        there.connect("data").unwrap().read(0, 4096).unwrap();
        let ended = writer.join().unwrap().unwrap();
        (rounds, ended.elapsed())
    });
    println!("{rounds} rounds beside the writer; {} ms without it", pause.as_millis());
    assert!(rounds > 0, "no round beside the writer");
    assert!(pause < LIMIT, "{pause:?}");
    fio(&there, &folder, "--rw=read").unwrap();
    assert!(content(&there) == content(&here));
}
