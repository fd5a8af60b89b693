//! The machinery for virtual machines does what tests count on.
#![allow(clippy::unwrap_used, reason = "test code")]

use blockd_tests::vm::{Drive, Vm};

#[test]
fn a_script_runs_on_a_real_kernel_with_modules_and_disks() {
    let disk = std::env::temp_dir().join(format!("blockd-vm-disk-{}", std::process::id()));
    std::fs::write(&disk, [b'x'; 1 << 20]).unwrap();
    let vm = Vm::new("script")
        .modules(&["dm-delay", "ublk_drv", "nbd"])
        .programs(&["dmsetup"])
        .drive(Drive::File(disk.clone()));
    let mut running = vm
        .start(
            "echo ready
             read -r word; echo \"heard $word\"
             dmsetup targets
             head -c 3 /dev/vda; echo
             printf abc | dd of=/dev/vda conv=fsync 2>/dev/null
             ls /dev/ublk-control",
        )
        .unwrap();
    running.wait_for("ready").unwrap();
    running.send("this").unwrap();
    running.wait_for("heard this").unwrap();
    let output = running.finish().unwrap();
    let written = std::fs::read(&disk).unwrap();
    std::fs::remove_file(&disk).unwrap();
    for said in ["delay ", "xxx", "/dev/ublk-control"] {
        assert!(output.text.contains(said), "no {said} in:\n{}", output.text);
    }
    assert_eq!(&written[..4], b"abcx");
}

#[test]
fn a_failing_script_is_an_error_with_what_it_said() {
    let error = Vm::new("failing").run("echo last words; exit 7").unwrap_err().to_string();
    assert!(error.contains("ended with 7") && error.contains("last words"), "{error}");
    let kept = error.rsplit("kept in ").next().unwrap();
    assert!(std::path::Path::new(kept).join("output").exists(), "{error}");
    std::fs::remove_dir_all(kept).unwrap();
}
