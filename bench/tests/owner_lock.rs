//! One pool, one owner, on the kernel's own terms: the lock is held by the open file that does the
//! IO, so a second owner waits until the first one's IO has ended, and is refused while it lives.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use blockd_bench::pump::driver::{self, Driver};
use blockd_bench::ring::Ring;

const SIZE: u64 = 32 << 20;

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

fn start_owner(path: &Path) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_owner"))
        .arg(path)
        .arg(SIZE.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "owner\n");
    child
}

#[test]
fn a_living_owner_excludes_all_others() {
    let pool = Pool::new("living");
    let first = pool.open().unwrap();
    let said = pool.open().unwrap_err();
    assert!(said.contains("another owner"), "{said}");
    first.close().unwrap();
    pool.open().unwrap().close().unwrap();
}

#[test]
fn a_killed_owner_is_followed_when_its_io_has_ended() {
    let pool = Pool::new("killed");
    for _ in 0..20 {
        let mut child = start_owner(&pool.path);
        child.kill().unwrap();
        // The lock is waited for; everything that the owner had on its way has ended then.
        let driver = pool.open().unwrap();
        child.wait().unwrap();
        driver.close().unwrap();
    }
}
