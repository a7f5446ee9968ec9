// A CUDA device that does nothing: guards for the dispatcher, hooks for autograd's engine.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using c10::DeviceType;
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return {DeviceType::CUDA, 0}; }
  c10::Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(DeviceType::CUDA, 0));
  }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream({DeviceType::CUDA, 0}); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream({DeviceType::CUDA, 0}); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
const Guard guard;
const c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard);
} // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};
} namespace at { namespace { REGISTER_CUDA_HOOKS(CUDAHooks); }
} // namespace at
