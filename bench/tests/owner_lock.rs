//! One pool, one owner, on the kernel's own terms: the lock is held by the open file that does the
//! IO, so a second owner waits until the first one's IO has ended, and is refused while it lives.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use blockd_bench::pump::driver::{self, Driver};
use blockd_bench::ring::Ring;
use blockd_testkit::clock::Clock;

const SIZE: u64 = 32 << 20;
/// In which the IO of an owner that has ended ends as well. An owner gives up after 5 seconds, for
/// which a busy disk is enough.
const LIMIT: Duration = Duration::from_secs(120);
/// An owner waits for at least this long before it gives up.
const WAIT: Duration = Duration::from_secs(4);

struct Pool {
    path: PathBuf,
}

impl Pool {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("blockd-{name}-{}", std::process::id()));
        File::create(&path).unwrap().set_len(SIZE).unwrap();
        let pool = Self { path };
        driver::create(&mut pool.ring(), name, SIZE).unwrap();
        pool
    }

    /// An open file description of its own.
    fn ring(&self) -> Ring {
        let file = File::options().read(true).write(true).open(&self.path).unwrap();
        Ring::new(file, 1).unwrap()
    }

    fn open(&self) -> Result<Driver, String> {
        Driver::open(self.ring(), "pool", SIZE).map(|(d, _)| d).map_err(|e| format!("{e:#}"))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        std::fs::remove_file(&self.path).unwrap();
    }
}

/// Tries again while the former owner's IO has not ended, each time after a wait.
fn once_free<T>(own: impl Fn() -> Result<T, String>) -> T {
    let clock = Clock::start();
    loop {
        let turn = Clock::start();
        match own() {
            Ok(owned) => return owned,
            Err(said) => {
                assert!(said.contains("another owner") && clock.elapsed() < LIMIT, "{said}");
                assert!(turn.elapsed() >= WAIT, "the lock was not waited for");
            }
        }
    }
}

fn start_owner(path: &Path) -> Result<Child, String> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_owner"))
        .arg(path)
        .arg(SIZE.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    if line == "owner\n" {
        return Ok(child);
    }
    let output = child.wait_with_output().unwrap();
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_living_owner_excludes_all_others() {
    let pool = Pool::new("living");
    let first = pool.open().unwrap();
    let said = pool.open().unwrap_err();
    assert!(said.contains("another owner"), "{said}");
    first.close().unwrap();
    once_free(|| pool.open()).close().unwrap();
}

#[test]
fn a_killed_owner_is_followed_when_its_io_has_ended() {
    let pool = Pool::new("killed");
    for _ in 0..20 {
        let mut child = once_free(|| start_owner(&pool.path));
        child.kill().unwrap();
        // The lock is waited for; everything that the owner had on its way has ended then.
        let driver = once_free(|| pool.open());
        child.wait().unwrap();
        driver.close().unwrap();
    }
}
