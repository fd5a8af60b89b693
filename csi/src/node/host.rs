//! This machine: each step is a function of `machine`, `memory` or `condition`.

use std::path::Path;

use super::condition;
use super::content::{Content, Making};
use super::machine;
use super::memory;
use super::mountinfo::{Device, Table};
use super::world::{DeviceLook, Kind, Loop, Machine, Mount, Mounted, Node, Result, Usage};

/// The machine that the plugin runs on.
#[derive(Debug)]
pub struct Host;

impl Machine for Host {
    fn mounts(&self) -> Result<Table> {
        machine::mounts()
    }

    fn mount(&self, mount: &Mount<'_>) -> Result<Mounted> {
        machine::mount_device(mount)
    }

    fn bind(&self, from: &Path, to: &Path) -> Result<()> {
        machine::bind(from, to)
    }

    fn make_read_only(&self, path: &Path) -> Result<()> {
        machine::make_read_only(path)
    }

    fn unmount(&self, path: &Path, lazily: bool) -> Result<()> {
        machine::unmount(path, lazily)
    }

    fn kind(&self, path: &Path) -> Result<Option<Kind>> {
        machine::kind(path)
    }

    fn make_folder(&self, path: &Path) -> Result<()> {
        machine::make_folder(path)
    }

    fn make_file(&self, path: &Path) -> Result<()> {
        machine::make_file(path)
    }

    fn remove(&self, path: &Path, kind: Kind) -> Result<()> {
        machine::remove(path, kind)
    }

    fn device_bytes(&self, device: &Device) -> Result<u64> {
        machine::device_bytes(device)
    }

    fn is_free(&self, device: &Device) -> Result<bool> {
        machine::is_free(device)
    }

    fn file_system_bytes(&self, device: &Device, file_system: &str) -> Result<Option<u64>> {
        machine::file_system_bytes(device, file_system)
    }

    fn content(&self, device: &Device) -> Result<Content> {
        machine::content(device)
    }

    fn wipe(&self, device: &Device) -> Result<()> {
        machine::wipe(device)
    }

    fn format(&self, device: &Device, file_system: &str, making: &Making) -> Result<()> {
        machine::format(device, file_system, making)
    }

    fn is_blank(&self, device: &Device) -> Result<bool> {
        memory::is_blank(device)
    }

    fn has_dax(&self, path: &Path) -> Result<bool> {
        memory::has_dax(&machine::mounts()?, path)
    }

    fn make_image(&self, file: &Path, partition: bool) -> Result<()> {
        memory::make_image(file, partition)
    }

    fn loop_of(&self, file: &Path) -> Result<Option<Loop>> {
        memory::loop_of(file)
    }

    fn attach_loop(&self, file: &Path, read_only: bool) -> Result<Loop> {
        memory::attach_loop(file, read_only)
    }

    fn detach_loop(&self, device: &Device) -> Result<()> {
        memory::detach_loop(device)
    }

    fn check(&self, device: &Device, file_system: &str) -> Result<()> {
        machine::check(device, file_system)
    }

    fn grow(&self, device: &Device, file_system: &str, path: &Path) -> Result<()> {
        machine::grow(device, file_system, path)
    }

    fn usage(&self, path: &Path) -> Result<(Usage, Usage)> {
        machine::usage(path)
    }

    fn device_look(&self, device: &Device) -> Result<DeviceLook> {
        condition::device(device)
    }

    fn node_at(&self, path: &Path, device: &Device) -> Result<Node> {
        condition::node(path, device)
    }

    fn file_system_errors(&self, device: &Device, file_system: &str) -> Result<u64> {
        Ok(condition::errors(device, file_system))
    }

    fn answers(&self, path: &Path) -> Result<bool> {
        condition::answers(path)
    }
}
