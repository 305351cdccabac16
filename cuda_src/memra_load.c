/* memra_load.c: takes the kernels out of cubins.
 *
 * The names come from the cubin's own sections, so that the driver is never asked for a kernel that is not there: a
 * memory checker would report that call.
 */
#include "memra_internal.h"

#include <dirent.h>
#include <elf.h>
#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>

typedef struct span {
    const unsigned char *bytes;
    uint64_t n_bytes;
} span;

static bool holds(span image, uint64_t offset, uint64_t n_bytes) {
    return offset <= image.n_bytes && n_bytes <= image.n_bytes - offset;
}

/* Section i of a cubin; false where it has no such section, or says that it lies beyond its end. */
static bool section(span image, const Elf64_Ehdr *header, uint64_t i, Elf64_Shdr *out) {
    const uint64_t offset = header->e_shoff + i * sizeof *out;
    if (i >= header->e_shnum || header->e_shoff > image.n_bytes || !holds(image, offset, sizeof *out)) return false;
    memcpy(out, image.bytes + offset, sizeof *out);
    return out->sh_type == SHT_NOBITS || holds(image, out->sh_offset, out->sh_size);
}

/* The segments lie behind all else: whether they are whole says where the cubin should end. */
static bool has_segments(span image, const Elf64_Ehdr *header) {
    Elf64_Phdr each;
    if (header->e_phoff > image.n_bytes || (header->e_phnum && header->e_phentsize != sizeof each)) return false;
    for (uint64_t i = 0; i < header->e_phnum; i++) {
        const uint64_t offset = header->e_phoff + i * sizeof each;
        if (!holds(image, offset, sizeof each)) return false;
        memcpy(&each, image.bytes + offset, sizeof each);
        if (!holds(image, each.p_offset, each.p_filesz)) return false;
    }
    return true;
}

/* Marks the kernels that have code in a cubin: section .text.<name>. */
static int find_names(span image, bool found[MEMRA_N_KERNELS]) {
    Elf64_Ehdr header;
    Elf64_Shdr names, each;
    if (!image.bytes || image.n_bytes < sizeof header || memcmp(image.bytes, ELFMAG, SELFMAG))
        return memra_fail(MEMRA_ERR_ARRAY, "memra_device_load: these %llu bytes are no cubin",
                          (unsigned long long)image.n_bytes);
    memcpy(&header, image.bytes, sizeof header);
    bool whole = has_segments(image, &header) && header.e_shentsize == sizeof each &&
                 section(image, &header, header.e_shstrndx, &names) && names.sh_type == SHT_STRTAB;
    for (uint64_t i = 0; whole && i < header.e_shnum; i++) {
        whole = section(image, &header, i, &each) && each.sh_name < names.sh_size;
        if (!whole) break;
        const char *const name = (const char *)image.bytes + names.sh_offset + each.sh_name;
        const size_t room = names.sh_size - each.sh_name;
        for (int k = 0; k < MEMRA_N_KERNELS; k++) {
            char wanted[64];
            const size_t n = (size_t)snprintf(wanted, sizeof wanted, ".text.%s", memra_kernel_names[k]) + 1;
            if (n <= room && !memcmp(name, wanted, n)) found[k] = true;
        }
    }
    return whole ? MEMRA_OK : memra_fail(MEMRA_ERR_ARRAY, "memra_device_load: the cubin is cut off or damaged");
}

/* Loads the kernels of a cubin that the device does not have yet; *n_found: how many of ours it holds. */
static int load(memra_device *device, span image, int *n_found) {
    bool found[MEMRA_N_KERNELS] = {false};
    CUkernel kernels[MEMRA_N_KERNELS] = {NULL};
    int n_new = 0;
    *n_found = 0;
    MEMRA_TRY(find_names(image, found));
    for (int k = 0; k < MEMRA_N_KERNELS; k++) {
        *n_found += found[k];
        found[k] = found[k] && !device->kernels[k] && memra_kernel_serves((enum memra_kernel)k, device->arch);
        n_new += found[k];
    }
    if (!n_new) return MEMRA_OK;
    CUlibrary library = NULL;
    char call[64];
    snprintf(call, sizeof call, "cuLibraryLoadData(%llu bytes)", (unsigned long long)image.n_bytes);
    const CUresult code = memra_cu.cuLibraryLoadData(&library, image.bytes, NULL, NULL, 0, NULL, NULL, 0);
    MEMRA_TRY(memra_cuda_status(call, code));
    int status = MEMRA_OK;
    for (int k = 0; k < MEMRA_N_KERNELS && status == MEMRA_OK; k++) {
        if (!found[k]) continue;
        snprintf(call, sizeof call, "cuLibraryGetKernel(%s)", memra_kernel_names[k]);
        status = memra_cuda_status(call, memra_cu.cuLibraryGetKernel(&kernels[k], library, memra_kernel_names[k]));
        if (status == MEMRA_OK) status = memra_kernel_prepare((enum memra_kernel)k, kernels[k], device->device);
    }
    if (status != MEMRA_OK) {
        (void)memra_cu.cuLibraryUnload(library);
        return status;
    }
    device->libraries[device->n_libraries++] = library;
    for (int k = 0; k < MEMRA_N_KERNELS; k++)
        if (found[k]) device->kernels[k] = kernels[k];
    return MEMRA_OK;
}

#define WHERE "; python -m memra_driver --cubins sm_%d names a folder that does"

int memra_device_load(memra_device *device, const void *cubin, uint64_t n_bytes) {
    int n_found = 0;
    MEMRA_TRY(memra_device_enter(device));
    MEMRA_TRY(load(device, (span){cubin, n_bytes}, &n_found));
    return n_found ? MEMRA_OK
                   : memra_fail(MEMRA_ERR_CONFIG, "memra_device_load: the cubin holds no kernel of this library" WHERE,
                                device->arch);
}

/* The bytes of a file, to be freed by the caller. */
static int read_file(const char *path, span *out) {
    struct stat what;
    if (stat(path, &what)) return memra_fail(MEMRA_ERR_CONFIG, "%s: %s", path, strerror(errno));
    if (!S_ISREG(what.st_mode)) /* a pipe could block, a device never end */
        return memra_fail(MEMRA_ERR_CONFIG, "%s: cannot be read: not a regular file", path);
    FILE *const file = fopen(path, "rb");
    if (!file) return memra_fail(MEMRA_ERR_CONFIG, "%s: %s", path, strerror(errno));
    unsigned char *bytes = NULL;
    const bool sized = fseek(file, 0, SEEK_END) == 0;
    const long size = sized ? ftell(file) : -1;
    if (size >= 0 && size < INT32_MAX) bytes = malloc((size_t)size + 1);
    const bool whole = bytes && fseek(file, 0, SEEK_SET) == 0 && fread(bytes, 1, (size_t)size, file) == (size_t)size;
    fclose(file);
    if (!whole) {
        free(bytes);
        return memra_fail(MEMRA_ERR_CONFIG, "%s: cannot be read", path);
    }
    *out = (span){bytes, (uint64_t)size};
    return MEMRA_OK;
}

static int load_file(memra_device *device, const char *path, int *n_found) {
    span image;
    MEMRA_TRY(read_file(path, &image));
    const int status = load(device, image, n_found);
    free((void *)image.bytes);
    return status;
}

int memra_device_load_file(memra_device *device, const char *path) {
    int n_found = 0;
    MEMRA_TRY(memra_device_enter(device));
    if (!path) return memra_fail(MEMRA_ERR_ARRAY, "memra_device_load_file: path is NULL");
    MEMRA_TRY(load_file(device, path, &n_found));
    if (n_found) return MEMRA_OK;
    return memra_fail(MEMRA_ERR_CONFIG, "%s holds no kernel of this library" WHERE, path, device->arch);
}

static bool is_cubin(const char *name) {
    const size_t n = strlen(name);
    return n > 6 && !strcmp(name + n - 6, ".cubin");
}

int memra_device_load_folder(memra_device *device, const char *folder) {
    MEMRA_TRY(memra_device_enter(device));
    if (!folder) return memra_fail(MEMRA_ERR_ARRAY, "memra_device_load_folder: folder is NULL");
    DIR *const opened = opendir(folder);
    if (!opened) return memra_fail(MEMRA_ERR_CONFIG, "%s: %s", folder, strerror(errno));
    int status = MEMRA_OK, n_all = 0;
    const struct dirent *entry;
    while (status == MEMRA_OK && (entry = readdir(opened)) != NULL) {
        if (!is_cubin(entry->d_name)) continue;
        const size_t room = strlen(folder) + strlen(entry->d_name) + 2;
        char *const path = malloc(room);
        int n_found = 0;
        if (!path) {
            status = memra_fail(MEMRA_ERR_OUT_OF_MEMORY, "%s: no host memory", folder);
            break;
        }
        snprintf(path, room, "%s/%s", folder, entry->d_name);
        status = load_file(device, path, &n_found);
        n_all += n_found;
        free(path);
    }
    closedir(opened);
    if (status == MEMRA_OK && !n_all)
        return memra_fail(MEMRA_ERR_CONFIG, "%s: no *.cubin there holds a kernel of this library" WHERE, folder,
                          device->arch);
    return status;
}
